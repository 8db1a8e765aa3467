/* The reduction of n buffers to one: what every variant of the kernels provides.
 *
 * A fold combines element i of every input, separately for every i, from left to right:
 *
 *     acc = in[0][i];  acc = acc (op) in[1][i];  ...  acc = acc (op) in[n-1][i];  out[i] = acc
 *
 * 16-bit floating types and the values of blocks accumulate in float, other types in themselves;
 * the result is rounded once, a block as a whole and dithered (block8.h).
 * The bits are the same in every variant and on every CPU:
 *   - a mean is the sum divided by n in the accumulator's type, before the rounding;
 *   - integers wrap modulo 2^bits;
 *   - min and max keep the earlier value on a tie (-0 and +0 tie), and are NaN if any input is;
 *   - a NaN result is the positive quiet NaN without payload, because which payload survives an
 *     addition differs between CPUs;
 *   - rounding is to nearest, ties to even; subnormal numbers are kept (see fold_run).
 *
 * A fold of leaves combines the same elements as a tree instead. An input is a subtree of leaves, and
 * the inputs are all of them, in the order of the leaves. They go on a stack, one after another; after
 * input i the latest two nodes are combined until depths[i] are left, the earlier one on the left:
 *
 *     out[i] = ((leaf 0 op leaf 1) op (leaf 2 op leaf 3)) op ...
 *
 * Every node is a value of the element type: 16-bit ones are rounded at each. A mean is the root
 * divided by the number of leaves in the accumulator's type, and rounded again.
 */
#ifndef REDUCER_KERNELS_FOLD_H
#define REDUCER_KERNELS_FOLD_H

#include <fenv.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernels are for little-endian CPUs, as the wire is; the NumPy twin serves the others"
#endif

/* The values of reducer.wire.constants.DType and ReduceOp; the tests compare them. */
enum fold_dtype {
    FOLD_FLOAT32 = 1,
    FOLD_FLOAT64,
    FOLD_FLOAT16,
    FOLD_BFLOAT16,
    FOLD_INT8,
    FOLD_INT32,
    FOLD_INT64,
    FOLD_UINT8,
    FOLD_BLOCK8,
    FOLD_BLOCK8_E4M3,
    FOLD_DTYPES
};
enum fold_op { FOLD_SUM = 1, FOLD_MEAN, FOLD_MIN, FOLD_MAX, FOLD_PRODUCT, FOLD_OPS };

/* Folds n >= 1 inputs of `count` elements, at any alignment. `out` is an input itself or overlaps
 * none. */
typedef void (*fold_fn)(void *out, const void *const *in, size_t n, size_t count);

/* Folds n inputs of `count` elements as the tree of so many leaves. */
typedef void (*fold_leaves_fn)(void *out, const void *const *in, const uint8_t *depths, size_t n,
                               size_t leaves, size_t count);
enum { FOLD_DEPTH = 17 }; /* of the stack at most: there are 2^16 leaves at most */

/* Reads n buffers of `nbytes` in a fold's order and does nothing else: the most that a fold can
 * reach, for the benchmark. Returns the exclusive or of all 64-bit words. */
typedef uint64_t (*read_fn)(const void *const *in, size_t n, size_t nbytes);

/* The kernels for one instruction set. An entry is NULL where the operation has no meaning. */
struct fold_table {
    const char *name;
    read_fn read;
    fold_fn fold[FOLD_DTYPES][FOLD_OPS];
    fold_leaves_fn leaves[FOLD_DTYPES][FOLD_OPS]; /* none of blocks */
};

extern const struct fold_table fold_generic;
#if defined(__x86_64__)
extern const struct fold_table fold_avx2;
extern const struct fold_table fold_avx512;
#elif defined(__aarch64__)
extern const struct fold_table fold_neon;
#endif

enum { FOLD_TABLES = 3 };

/* Fills in the tables that this CPU and operating system can run, best first; returns how many. */
size_t fold_usable(const struct fold_table *usable[FOLD_TABLES]);

/* Runs one fold under the default floating-point environment, whatever this thread's is: a library
 * may have made it flush subnormal numbers to zero, or round in another direction. */
static inline void fold_run(fold_fn fold, void *out, const void *const *in, size_t n, size_t count)
{
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    fold(out, in, n, count);
    fesetenv(&callers);
}

/* The same for a fold of leaves. */
static inline void fold_leaves_run(fold_leaves_fn fold, void *out, const void *const *in,
                                   const uint8_t *depths, size_t n, size_t leaves, size_t count)
{
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    fold(out, in, depths, n, leaves, count);
    fesetenv(&callers);
}

#endif
