/* Blocks of 252 values with one scale (BLOCK8: reducer/wire/README.md, section 4), to and from
 * float.
 *
 * Included by the templates, after isa_<variant>.h. A block is handled as 256 lanes in the order of
 * memory, whose first four, where the scale is, have no meaning: so each vector of q is a whole
 * one, within the block, and aligned if that is.
 */
enum {
    BLOCK8_VALUES = 252,
    BLOCK8_BYTES = 256,
    BLOCK8_SCALE = BLOCK8_BYTES - BLOCK8_VALUES, /* bytes of the scale, and lanes without meaning */
    BLOCK8_LANES = ISA_VECTOR_BYTES / 4,         /* of a vector of float */
    BLOCK8_VECTORS = BLOCK8_BYTES / BLOCK8_LANES
};

INLINE float block8_scale(const unsigned char *block) {
    float scale;
    memcpy(&scale, block, sizeof scale);
    return scale;
}

/* The values of vector `v` of a block; `scale` is in every lane. */
INLINE v_f32 block8_values(const unsigned char *block, size_t v, v_f32 scale) {
    v_i32 q = load_bytes((const int8_t *)block + v * BLOCK8_LANES);
    return scale * __builtin_convertvector(q, v_f32);
}

/* What is added to x * (127 / m), with x in vector `v` of the block, before it is rounded to
 * nearest: between -1/2 and 1/2, and as evenly spread as the last bits of x are. It has 12 bits, so
 * that an integer, of which the multiplication leaves 2^-15 more or less, stays what it is. */
INLINE v_f32 block8_dither(v_f32 x, size_t v) {
    v_u32 at = {0};
    for (size_t lane = 0; lane < BLOCK8_LANES; lane++) {
        at[lane] = (uint32_t)(v * BLOCK8_LANES + lane) * 0x9e3779b1u;
    }
    v_u32 mixed = ((v_u32)x ^ at) * 0x85ebca6bu;
    mixed = (mixed ^ mixed >> 15) * 0xc2b2ae35u;
    v_f32 steps = __builtin_convertvector((v_i32)(mixed >> 20), v_f32);
    return (steps - 2047.5f) * 0x1p-12f;
}

/* Rounds a block: to nearest, or dithered. Lanes without meaning may hold anything. */
INLINE void block8_round(unsigned char *block, v_f32 x[BLOCK8_VECTORS], int dithered) {
    UNROLL for (size_t v = 0; v * BLOCK8_LANES < BLOCK8_SCALE; v++) {
        v_u32 means = {0};
        for (size_t lane = 0; lane < BLOCK8_LANES; lane++) {
            means[lane] = v * BLOCK8_LANES + lane < BLOCK8_SCALE ? 0 : 0xffffffff;
        }
        x[v] = (v_f32)((v_u32)x[v] & means);
    }
    /* The order of floats without a sign is that of their bits, infinity and NaN last. */
    v_i32 most = {0};
    UNROLL for (size_t v = 0; v < BLOCK8_VECTORS; v++) {
        v_i32 magnitude = (v_i32)x[v] & 0x7fffffff;
        v_i32 larger = magnitude > most;
        most = (magnitude & larger) | (most & ~larger);
    }
    int32_t largest = 0;
    UNROLL for (size_t lane = 0; lane < BLOCK8_LANES; lane++) {
        largest = most[lane] > largest ? most[lane] : largest;
    }
    float m;
    memcpy(&m, &largest, sizeof m);
    float scale = m / 127.0f, by = 127.0f / m;
    if (largest >= 0x7f800000 || m < 0x1p-100f) {
        memset(block, 0, BLOCK8_BYTES);
        scale = largest >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
    } else {
        UNROLL for (size_t v = 0; v < BLOCK8_VECTORS; v++) {
            v_f32 steps = x[v] * by;
            if (dithered) {
                steps += block8_dither(x[v], v);
            }
            /* 1.5 * 2^23: the sum's last bit is worth one, and its last byte is the integer. */
            v_i32 q = (v_i32)(steps + 0x1.8p23f);
            store_bytes((int8_t *)block + v * BLOCK8_LANES, q);
        }
    }
    memcpy(block, &scale, sizeof scale);
}
