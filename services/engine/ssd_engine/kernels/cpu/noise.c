/* Uniform noise of every token, by Philox4x32-10: ssd_engine/sampling/noise.py has the definition.
 * Only integers are computed until one exact conversion: the bits are those of any other way. */
#include <stddef.h>
#include <stdint.h>

#define ROUNDS 10
#define LANES 64 /* tokens side by side, as the compiler likes them for vectors */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

struct words {
    uint32_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
};

/* Noise [rows, tokens], in (0, 1), for the TOKENS of each row; NULL: those from 0 on. */
FOR_EACH_PROCESSOR
void uniform_noise(const uint64_t *seeds, const uint64_t *positions, const uint64_t *tokens,
                   size_t rows, size_t width, uint32_t stream, double *out) {
    for (size_t row = 0; row < rows; row++, out += width) {
        for (size_t first = 0; first < width; first += LANES) {
            size_t count = width - first < LANES ? width - first : LANES;
            const uint64_t *named = tokens == NULL ? NULL : tokens + row * width + first;
            struct words w;
            for (uint32_t i = 0; i < LANES; i++) {
                w.c0[i] = named == NULL ? (uint32_t)first + i : i < count ? (uint32_t)named[i] : 0;
                w.c1[i] = (uint32_t)positions[row];
                w.c2[i] = (uint32_t)(positions[row] >> 32);
                w.c3[i] = stream;
            }
            uint32_t k0 = (uint32_t)seeds[row], k1 = (uint32_t)(seeds[row] >> 32);
            for (int round = 0; round < ROUNDS; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
                for (int i = 0; i < LANES; i++) {
                    uint64_t p0 = (uint64_t)0xD2511F53u * w.c0[i];
                    uint64_t p1 = (uint64_t)0xCD9E8D57u * w.c2[i];
                    w.c0[i] = (uint32_t)(p1 >> 32) ^ w.c1[i] ^ k0;
                    w.c2[i] = (uint32_t)(p0 >> 32) ^ w.c3[i] ^ k1;
                    w.c1[i] = (uint32_t)p1;
                    w.c3[i] = (uint32_t)p0;
                }
            }
            for (size_t i = 0; i < count; i++) out[first + i] = (w.c0[i] + 0.5) * 0x1p-32;
        }
    }
}
