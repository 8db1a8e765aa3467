/* Kernels in instructions that every CPU of the architecture has; halves convert in software. */
#include "fold.h"

#define FOLD_TARGET
#define FOLD_VECTOR_BYTES 16
#define FOLD_TABLE fold_generic
#define FOLD_NAME "generic"
#include "fold_template.h"
