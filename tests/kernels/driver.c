/* Folds and casts for whoever writes requests to standard input: golden.py's, under an emulator.
 *
 *     driver              prints the variants that this CPU can run, best first
 *     driver VARIANT      answers each request on standard output, until the input ends
 *
 * A request is a `struct request`, and then its inputs, each of `nbytes`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "reducer/kernels/fold.h"
#include "worker_client/staging/cast.h"

enum kind { FOLD, NARROW, KEEP, WIDEN, DIVIDE };

struct request {
    uint32_t kind, dtype, op, inputs;
    uint64_t count, nbytes, out_bytes;
    double by;
};

enum { MOST_INPUTS = 32, LINE = 64 };

/* Memory that begins `offset` bytes into a line. */
static unsigned char *misaligned(size_t nbytes, size_t offset) {
    unsigned char *memory = aligned_alloc(LINE, (nbytes + offset) / LINE * LINE + LINE);
    if (memory == NULL) {
        abort();
    }
    return memory + offset;
}

static void answer(const struct fold_table *folds, const struct cast_table *casts,
                   const struct request *its, unsigned char **in, unsigned char *out) {
    fenv_t callers;
    if (its->kind == FOLD) {
        fold_run(folds->fold[its->dtype][its->op], out, (const void *const *)in, its->inputs,
                 its->count);
        return;
    }
    cast_begin(&callers);
    if (its->kind == NARROW) {
        casts->narrow[its->dtype](out, in[0], its->count);
    } else if (its->kind == KEEP) {
        casts->narrow_keeping[its->dtype](out, in[0], in[1], its->count);
        memcpy(out + its->out_bytes - its->nbytes, in[1], its->nbytes);
    } else if (its->kind == WIDEN) {
        casts->widen[its->dtype](out, in[0], its->count);
    } else {
        memcpy(out, in[0], its->nbytes);
        if (its->dtype == FOLD_FLOAT32) {
            casts->divide_f32(out, (float)its->by, its->count);
        } else {
            casts->divide_f64(out, its->by, its->count);
        }
    }
    cast_end(&callers);
}

int main(int argc, char **argv) {
    const struct fold_table *folds[FOLD_TABLES];
    const struct cast_table *casts[CAST_TABLES];
    size_t usable = fold_usable(folds), at = 0;
    if (cast_usable(casts) != usable) {
        return 2;
    }
    if (argc == 1) {
        for (; at < usable; at++) {
            puts(folds[at]->name);
        }
        return 0;
    }
    while (at < usable && (strcmp(folds[at]->name, argv[1]) || strcmp(casts[at]->name, argv[1]))) {
        at++;
    }
    if (at == usable) {
        return 3;
    }
    struct request its;
    while (fread(&its, sizeof its, 1, stdin) == 1) {
        unsigned char *in[MOST_INPUTS];
        unsigned char *out = misaligned(its.out_bytes, 1);
        for (size_t i = 0; i < its.inputs; i++) {
            in[i] = misaligned(its.nbytes, i % 5);
            if (fread(in[i], 1, its.nbytes, stdin) != its.nbytes) {
                return 4;
            }
        }
        answer(folds[at], casts[at], &its, in, out);
        fwrite(out, 1, its.out_bytes, stdout);
        free(out - 1);
        for (size_t i = 0; i < its.inputs; i++) {
            free(in[i] - i % 5);
        }
    }
    return 0;
}
