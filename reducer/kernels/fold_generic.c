/* Kernels in instructions that every CPU of the architecture has; halves convert in software. */
#include "fold.h"
#include "isa_generic.h"

#define FOLD_HALF_BLOCK 8
#define FOLD_TABLE fold_generic
#include "fold_template.h"
