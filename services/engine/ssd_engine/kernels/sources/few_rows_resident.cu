// A few rows times a weight matrix that is read once, with all of x in shared memory.
//
// out[r][n] = sum_k x[r][k] * w[n][k]; x [COLUMNS][K], w [N][K] in bf16, sums in float32.
//
// One block per multiprocessor. Its warps first bring x into shared memory, while their first
// weights are on their way, then each streams weight rows straight into the registers of
// mma.m16n8k16, the next ones always in flight. Which k goes to which place of the instruction does
// not matter as long as both operands agree, so lanes load 16 contiguous bytes. SLICES warps divide
// the k of one group of weight rows; their sums are added in a fixed order: a row's result depends
// on that row and on nothing else.
//
// Compiled for one shape: N, K, OCTETS (of x rows), TILES (of 16 weight rows per group), SLICES,
// UNROLL (of 32 k), WARPS, GRID, and
//   NORM   x is normalised: x * norm * rsqrt(mean(x^2) + eps), the last factor after the sum
//   GATED  the upper half of the weight gates the lower: out = silu(first) * second, [rows][N / 2]
//   BIAS   out += bias
//   WIDE   out is float32

#define COLUMNS (OCTETS * 8)
#define HEIGHT (TILES * 16)
#define SLOTS (WARPS / SLICES)  // groups that a block works on at a time
#define NUM_GROUPS (N / HEIGHT)
#define PASSES ((NUM_GROUPS + GRID * SLOTS - 1) / (GRID * SLOTS))
#define STEPS (K / (32 * UNROLL * SLICES))
#define STRIDE (K / 8 + 4)  // of a row of x, in 16 bytes: eight rows fall on different banks

__device__ __forceinline__ float squares_of(u32 pair) {
    return low(pair) * low(pair) + high(pair) * high(pair);
}

__device__ __forceinline__ void store(void* out, long at, float value) {
#if WIDE
    ((float*)out)[at] = value;
#else
    ((u16*)out)[at] = (u16)(pack(value, 0.f) & 0xffffu);
#endif
}

// The first weight row of tile i of a group; with GATED, tiles of the two halves alternate.
__device__ __forceinline__ long first_row(int group, int i) {
#if GATED
    return (long)(i % 2) * (N / 2) + ((long)group * (TILES / 2) + i / 2) * 16;
#else
    return ((long)group * TILES + i) * 16;
#endif
}

__device__ __forceinline__ int group_of(int pass, int slot) {
    return (pass * SLOTS + slot) * GRID + blockIdx.x;
}

__device__ __forceinline__ void load(uint4 (&a)[TILES][UNROLL][2], const uint4* w, int group,
                                     int step, int slice, int g, int t) {
    if (group >= NUM_GROUPS) return;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                a[i][u][h] = stream(w + (first_row(group, i) + g + 8 * h) * (K / 8) +
                                    ((step * SLICES + slice) * UNROLL + u) * 4 + t);
}

// x, times the weight of its norm, to shared memory, and the sums of its squares. Two warps share a
// row and read half of it each.
__device__ __forceinline__ void bring_x(uint4* shared_x, float* squares, const uint4* x,
                                        const uint4* norm) {
    constexpr int PIECES = K / 512;            // of 16 bytes, of half a row, of a lane
    constexpr int TURNS = COLUMNS * 2 / WARPS;  // rows of a warp
    const int row = threadIdx.x / 64, first = threadIdx.x / 32 % 2 * (K / 16) + threadIdx.x % 32;
    uint4 v[TURNS][PIECES];
#pragma unroll
    for (int i = 0; i < TURNS; i++)
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            v[i][p] = __ldcg(x + (i * (WARPS / 2) + row) * (K / 8) + first + p * 32);
#if NORM
    float sum[TURNS] = {};
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const uint4 s = __ldg(norm + first + p * 32);
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            uint4& u = v[i][p];
            sum[i] += squares_of(u.x) + squares_of(u.y) + squares_of(u.z) + squares_of(u.w);
            u.x = weighted(u.x, s.x), u.y = weighted(u.y, s.y);
            u.z = weighted(u.z, s.z), u.w = weighted(u.w, s.w);
        }
    }
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
#pragma unroll
        for (int d = 16; d > 0; d /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], d);
        if (threadIdx.x % 32 == 0) squares[i * WARPS + threadIdx.x / 32] = sum[i];
    }
#endif
#pragma unroll
    for (int i = 0; i < TURNS; i++)
#pragma unroll
        for (int p = 0; p < PIECES; p++)
            shared_x[(i * (WARPS / 2) + row) * STRIDE + first + p * 32] = v[i][p];
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
few_rows_resident(const uint4* __restrict__ w, const uint4* x, const uint4* __restrict__ norm,
                  const u16* __restrict__ bias, void* out, float eps, int rows) {
    extern __shared__ uint4 shared[];
    uint4* shared_x = shared;
    float* sums = (float*)(shared + COLUMNS * STRIDE);  // [WARPS][COLUMNS][HEIGHT + 1]
    float* squares = sums + WARPS * COLUMNS * (HEIGHT + 1);  // [COLUMNS][2]
    float* scale = squares + COLUMNS * 2;                      // [COLUMNS]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int slot = warp / SLICES, slice = warp % SLICES;

    uint4 a[TILES][UNROLL][2] = {};
    load(a, w, group_of(0, slot), 0, slice, g, t);
    let_next_begin();
    wait_for_previous();
    bring_x(shared_x, squares, x, norm);
#if NORM
    if (threadIdx.x < COLUMNS) {  // read after the next barrier
        const float total = squares[threadIdx.x * 2] + squares[threadIdx.x * 2 + 1];
        scale[threadIdx.x] = rsqrtf(total * (1.f / K) + eps);
    }
#endif

    uint4 next[TILES][UNROLL][2] = {};
#pragma unroll 1
    for (int pass = 0; pass < PASSES; pass++) {
        const int group = group_of(pass, slot);
        float c[TILES][OCTETS][4] = {};
#pragma unroll 1
        for (int step = 0; step < STEPS; step++) {
            const bool last = step == STEPS - 1;
            if (!last || pass + 1 < PASSES)
                load(next, w, last ? group_of(pass + 1, slot) : group, last ? 0 : step + 1, slice,
                     g, t);
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                uint4 b[OCTETS];
#pragma unroll
                for (int o = 0; o < OCTETS; o++)
                    b[o] = shared_x[(o * 8 + g) * STRIDE +
                                    ((step * SLICES + slice) * UNROLL + u) * 4 + t];
#pragma unroll
                for (int i = 0; i < TILES; i++)
#pragma unroll
                    for (int o = 0; o < OCTETS; o++) {
                        multiply(c[i][o], a[i][u][0].x, a[i][u][1].x, a[i][u][0].y,
                                 a[i][u][1].y, b[o].x, b[o].y);
                        multiply(c[i][o], a[i][u][0].z, a[i][u][1].z, a[i][u][0].w,
                                 a[i][u][1].w, b[o].z, b[o].w);
                    }
            }
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int u = 0; u < UNROLL; u++) {
                    a[i][u][0] = next[i][u][0];
                    a[i][u][1] = next[i][u][1];
                }
        }

        float* mine = sums + warp * COLUMNS * (HEIGHT + 1);
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int o = 0; o < OCTETS; o++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mine[(o * 8 + 2 * t + j % 2) * (HEIGHT + 1) + i * 16 + g + j / 2 * 8] =
                        c[i][o][j];
        __syncthreads();

        constexpr int OUTPUTS = GATED ? HEIGHT / 2 : HEIGHT;
        for (int e = threadIdx.x; e < SLOTS * COLUMNS * OUTPUTS; e += WARPS * 32) {
            const int s = e / (COLUMNS * OUTPUTS), row = e / OUTPUTS % COLUMNS, m = e % OUTPUTS;
            const int whose = group_of(pass, s);
            if (row >= rows || whose >= NUM_GROUPS) continue;
            const int at = GATED ? m / 16 * 32 + m % 16 : m;
            const long column = (long)whose * OUTPUTS + m;
            float value = 0.f, up = 0.f;
#pragma unroll
            for (int v = 0; v < SLICES; v++) {
                const float* theirs =
                    sums + ((s * SLICES + v) * COLUMNS + row) * (HEIGHT + 1) + at;
                value += theirs[0];
                if (GATED) up += theirs[16];
            }
#if NORM
            value *= scale[row], up *= scale[row];
#endif
#if BIAS
            value += __uint_as_float((u32)bias[column] << 16);
            if (GATED) up += __uint_as_float((u32)bias[N / 2 + column] << 16);
#endif
            if (GATED) value = value / (1.f + __expf(-value)) * up;
            store(out, (long)row * (GATED ? N / 2 : N) + column, value);
        }
        __syncthreads();
    }
}
