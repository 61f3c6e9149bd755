/* The sets of instructions that a kernel is compiled for, each once.

   Before this file is included, SET_BODY names the file with a kernel's functions, and there is a
   struct instruction_set. The body is included once for each set, after these definitions, and
   defines SET(set), a constant struct instruction_set:

   SET(name)            the name of a function of this set
   TARGET               the attribute of its functions
   LANES, FLOATS, WORDS floats of a vector; a vector of floats; a vector of 32-bit words
   LOAD, STORE, SPREAD, ADD_PRODUCT, LOAD_WORDS, LOW, HIGH   what vectors can do
   SUM_EACH             of four vectors each the sum of its floats: halves are added until one is left
   WHOLE_ROWS, MOST_ROWS of a tile of products: see panels_tiles.h

   After it there is find_set.
*/

#include <stdint.h>
#include <string.h>

#define UNROLL _Pragma("GCC unroll 32")

/* Vectors of four, as any compiler has them. Without a fused step: rounding differs from the rest. */
typedef float four_floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t four_words __attribute__((vector_size(16), aligned(4), may_alias));
#define SET(name) portable_##name
#define TARGET
#define LANES 4
#define FLOATS four_floats
#define WORDS four_words
#define LOAD(p) (*(const four_floats *)(p))
#define STORE(p, v) (*(four_floats *)(p) = (v))
#define SPREAD(f) ((four_floats){(f), (f), (f), (f)})
#define ADD_PRODUCT(sum, a, b) ((sum) + (a) * (b))
#define LOAD_WORDS(p) (*(const four_words *)(p))
#define LOW(words) ((four_floats)((words) << 16))
#define HIGH(words) ((four_floats)((words) & 0xffff0000u))
#define SUM_EACH(v, sums) \
    for (int i = 0; i < 4; i++) (sums)[i] = ((v)[i][0] + (v)[i][2]) + ((v)[i][1] + (v)[i][3])
#define WHOLE_ROWS 1
#define MOST_ROWS 4
#include SET_BODY
#include "instruction_set_end.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Four times eight floats: a vector with the halves of two is added to one with the other halves. */
static inline __attribute__((target("avx2"))) void sum_each_of_8(const __m256 *v, float *sums) {
    __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(v[0], v[1], 0x20),
                              _mm256_permute2f128_ps(v[0], v[1], 0x31));
    __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(v[2], v[3], 0x20),
                              _mm256_permute2f128_ps(v[2], v[3], 0x31));
    __m256 twos = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    __m256 ones = _mm256_add_ps(_mm256_shuffle_ps(twos, twos, 0x88),
                                _mm256_shuffle_ps(twos, twos, 0xdd));
    __m128 ac = _mm256_castps256_ps128(ones), bd = _mm256_extractf128_ps(ones, 1);
    _mm_storeu_ps(sums, _mm_unpacklo_ps(ac, bd));
}

static inline __attribute__((target("avx512f"))) void sum_each_of_16(const __m512 *v, float *sums) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x44),
                              _mm512_shuffle_f32x4(v[0], v[1], 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(v[2], v[3], 0x44),
                              _mm512_shuffle_f32x4(v[2], v[3], 0xee));
    __m512 fours = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88),
                                 _mm512_shuffle_f32x4(ab, cd, 0xdd));
    __m512 twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x4e));
    __m512 ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0xb1));
    _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, ones)));
}

#define SET(name) avx2_##name
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define FLOATS __m256
#define WORDS __m256i
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define SPREAD(f) _mm256_set1_ps(f)
#define ADD_PRODUCT(sum, a, b) _mm256_fmadd_ps(a, b, sum)
#define LOAD_WORDS(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOW(words) _mm256_castsi256_ps(_mm256_slli_epi32(words, 16))
#define HIGH(words) \
    _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32((int)0xffff0000)))
#define SUM_EACH(v, sums) sum_each_of_8(v, sums)
#define WHOLE_ROWS 3
#define MOST_ROWS 6
#include SET_BODY
#include "instruction_set_end.h"

#define SET(name) avx512_##name
#define TARGET __attribute__((target("avx512f")))
#define LANES 16
#define FLOATS __m512
#define WORDS __m512i
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define SPREAD(f) _mm512_set1_ps(f)
#define ADD_PRODUCT(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#define LOAD_WORDS(p) _mm512_loadu_si512((const void *)(p))
#define LOW(words) _mm512_castsi512_ps(_mm512_slli_epi32(words, 16))
#define HIGH(words) \
    _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)))
#define SUM_EACH(v, sums) sum_each_of_16(v, sums)
#define WHOLE_ROWS 14
#define MOST_ROWS 14
#include SET_BODY
#include "instruction_set_end.h"
#endif

#if defined(__aarch64__)
#include <arm_neon.h>

#define SET(name) neon_##name
#define TARGET
#define LANES 4
#define FLOATS float32x4_t
#define WORDS uint32x4_t
#define LOAD(p) vld1q_f32(p)
#define STORE(p, v) vst1q_f32(p, v)
#define SPREAD(f) vdupq_n_f32(f)
#define ADD_PRODUCT(sum, a, b) vfmaq_f32(sum, a, b)
#define LOAD_WORDS(p) vld1q_u32(p)
#define LOW(words) vreinterpretq_f32_u32(vshlq_n_u32(words, 16))
#define HIGH(words) vreinterpretq_f32_u32(vandq_u32(words, vdupq_n_u32(0xffff0000u)))
#define SUM_EACH(v, sums)         \
    for (int i = 0; i < 4; i++) { \
        float32x2_t two = vadd_f32(vget_low_f32((v)[i]), vget_high_f32((v)[i])); \
        (sums)[i] = vget_lane_f32(two, 0) + vget_lane_f32(two, 1); \
    }
#define WHOLE_ROWS 2
#define MOST_ROWS 5
#include SET_BODY
#include "instruction_set_end.h"
#endif

/* By name; NULL where the processor does not have it. */
static const struct instruction_set *find_set(const char *name) {
    if (!strcmp(name, "portable")) return &portable_set;
#if defined(__x86_64__)
    if (!strcmp(name, "AVX2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &avx2_set;
    if (!strcmp(name, "AVX-512") && __builtin_cpu_supports("avx512f")) return &avx512_set;
#endif
#if defined(__aarch64__)
    if (!strcmp(name, "NEON")) return &neon_set;
#endif
    return NULL;
}
