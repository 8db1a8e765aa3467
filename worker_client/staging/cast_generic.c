/* Casts in instructions that every CPU of the architecture has. */
#include "cast.h"
#include "reducer/kernels/isa_generic.h"

#define CAST_TABLE cast_generic
#include "cast_template.h"
