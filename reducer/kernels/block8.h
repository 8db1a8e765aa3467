/* Blocks of 252 values with one scale (BLOCK8 and BLOCK8_E4M3: docs/protocol.md, section 4),
 * to and from float.
 *
 * Included by the templates, after isa_<variant>.h. A block is handled as 256 lanes in the order of
 * memory, whose first four, where the scale is, have no meaning: so each vector of q is a whole
 * one, within the block, and aligned if that is. What q is, is a constant once functions are
 * inlined.
 */
enum block8_q { Q_INT8, Q_E4M3 };
enum {
    BLOCK8_VALUES = 252,
    BLOCK8_BYTES = 256,
    BLOCK8_SCALE = BLOCK8_BYTES - BLOCK8_VALUES, /* bytes of the scale, and lanes without meaning */
    BLOCK8_LANES = ISA_VECTOR_BYTES / 4,         /* of a vector of float */
    BLOCK8_VECTORS = BLOCK8_BYTES / BLOCK8_LANES
};
/* Of E4M3: the mantissa's bits that a float has beyond its own, and the bits of the float 2^-6,
 * below which steps become no smaller. */
enum { E4M3_SHIFT = 20, E4M3_SMALL = 121 << 23 };

/* The scale in every lane: less 0, which -0 stays. */
INLINE v_f32 block8_scale(const unsigned char *block) {
    float scale;
    memcpy(&scale, block, sizeof scale);
    return scale - (v_f32){0};
}

/* The numbers that bytes of E4M3 stand for. */
INLINE v_f32 load_e4m3(const unsigned char *from) {
#ifdef ISA_CONVERTS_HALVES
    /* float16 has one more bit of exponent: 2^-8 of the number. The sum's bit 14 makes 0x7f NaN. */
    v_i16 half = (load_words(from) << 7) & (int16_t)0xbf80;
    half |= (half + 0x80) & 0x4000;
    return widen_half(half) * 0x1p8f;
#else
    v_i32 q = load_bytes((const int8_t *)from), magnitude = q & 0x7f;
    /* From exponent bias 7 to 127. This is x / 2 + 2^-7 for the x below 2^-6. */
    v_f32 x = (v_f32)((magnitude << E4M3_SHIFT) + (120 << 23));
    v_i32 missing = (v_i32)(x - 0x1p-6f);
    x += (v_f32)(missing & missing >> 31);
    return (v_f32)((v_i32)x | (q & INT32_MIN) | (v_i32)(magnitude == 0x7f));
#endif
}

/* The values of vector `v` of a block; `scale` is in every lane. */
INLINE v_f32 block8_values(const unsigned char *block, size_t v, v_f32 scale, enum block8_q of) {
    const unsigned char *from = block + v * BLOCK8_LANES;
    return scale * (of == Q_E4M3 ? load_e4m3(from)
                                 : __builtin_convertvector(load_bytes((const int8_t *)from), v_f32));
}

/* What is added to y, in units of 2^-12 of a step, before it is rounded to nearest: between -2048
 * and 2048, and as evenly spread as the last bits of x are. It has 12 bits, so that what is a q, of
 * which the multiplication leaves 2^-15 of a step more or less, stays what it is. */
INLINE v_f32 block8_dither(v_f32 x, size_t v) {
    v_u32 at = {0};
    for (size_t lane = 0; lane < BLOCK8_LANES; lane++) {
        at[lane] = (uint32_t)(v * BLOCK8_LANES + lane) * 0x9e3779b1u;
    }
    v_u32 mixed = ((v_u32)x ^ at) * 0x85ebca6bu;
    mixed = (mixed ^ mixed >> 15) * 0xc2b2ae35u;
    return __builtin_convertvector((v_i32)(mixed >> 20), v_f32) - 2047.5f;
}

/* Rounds y = x * (127 / m), of vector `v`. */
INLINE v_i32 int8_rounded(v_f32 y, v_f32 x, size_t v, int dithered) {
    if (dithered) {
        y += block8_dither(x, v) * 0x1p-12f;
    }
    /* 1.5 * 2^23: the sum's last bit is worth one, and its last byte is the integer. */
    return (v_i32)(y + 0x1.8p23f);
}

/* Rounds y = x * (448 / m), of vector `v`, which does not come beyond 448 by more than a step's
 * small part. */
INLINE v_i32 e4m3_rounded(v_f32 y, v_f32 x, size_t v, int dithered) {
    v_i32 magnitude = (v_i32)y & 0x7fffffff;
    v_i32 is_small = magnitude < E4M3_SMALL;
    /* The power of two that has 8 steps; its exponent is that of y, but for a small one. */
    v_i32 eight = ((magnitude & ~is_small) | (E4M3_SMALL & is_small)) & 0x7f800000;
    v_f32 size = (v_f32)magnitude;
    if (dithered) {
        size += block8_dither(x, v) * (v_f32)(eight - (15 << 23));
    }
    /* 1.5 * 2^23 steps: the sum's last bit is worth one. 16 steps are 8 of the next exponent. */
    v_i32 many = eight + (20 << 23) + (1 << 22);
    v_i32 steps = (v_i32)(size + (v_f32)many) - many;
    return (steps + (eight >> E4M3_SHIFT) - (E4M3_SMALL >> E4M3_SHIFT)) | ((v_i32)y >> 31 & 0x80);
}

/* Rounds a block: to nearest, or dithered. Lanes without meaning may hold anything. */
INLINE void block8_round(unsigned char *block, v_f32 x[BLOCK8_VECTORS], enum block8_q to,
                         int dithered) {
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
    const float largest_q = to == Q_INT8 ? 127.0f : 448.0f;
    float scale = m / largest_q, by = largest_q / m;
    if (largest >= 0x7f800000 || m < 0x1p-100f) {
        memset(block, 0, BLOCK8_BYTES);
        scale = largest >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
    } else {
        UNROLL for (size_t v = 0; v < BLOCK8_VECTORS; v++) {
            v_f32 y = x[v] * by;
            v_i32 q = to == Q_INT8 ? int8_rounded(y, x[v], v, dithered)
                                   : e4m3_rounded(y, x[v], v, dithered);
            store_bytes((int8_t *)block + v * BLOCK8_LANES, q);
        }
    }
    memcpy(block, &scale, sizeof scale);
}
