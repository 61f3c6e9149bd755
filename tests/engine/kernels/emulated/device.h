// As much of a CUDA device as our kernels of few rows use, on one CPU core.
//
// Every thread is a fiber; a barrier is a yield until all have come. What a warp does together,
// shuffles and matrix instructions, is done by fibers that wait for each other. Only the blocks of
// a cluster live at the same time: a device promises no more.

#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

namespace device {

void yield();

struct Barrier {
    int needed = 0, come = 0, times = 0;
    void arrive() {
        come++;
        go_on();
    }
    void leave() {
        needed--;
        go_on();
    }
    void go_on() {
        if (come && come == needed) come = 0, times++;
    }
    void wait() {
        const int now = times;
        arrive();
        while (times == now) yield();
    }
};

struct Warp {
    Barrier barrier;
    struct Operands {
        u32 word[8];
        const void* address;
    } of[32];
};

struct Block {
    int x, y, rank;
    std::vector<uint4> memory;
    std::vector<Warp> warps;
    Barrier barrier, computing;
    struct Cluster* cluster;
    Barrier named[16] = {};
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    Barrier barrier;
};

struct Thread {
    ucontext_t context;  // to begin with; from then on jumps, which ask nothing of the system
    jmp_buf place;
    bool begun = false;
    std::vector<char> stack;
    Block* block;
    int index;
    int cluster_times = 0;
    bool done = false;
    Warp& warp() { return block->warps[index / 32]; }
    int lane() const { return index % 32; }
};

inline Thread* current = nullptr;
inline jmp_buf scheduler;
inline void yield() {
    if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}
inline void resume(Thread* thread) {
    current = thread;
    if (_setjmp(scheduler)) return;
    if (thread->begun) _longjmp(thread->place, 1);
    thread->begun = true;
    setcontext(&thread->context);
}

inline std::function<void()> entry;
inline void trampoline() {
    entry();
    current->done = true;
    current->block->cluster->barrier.leave();  // it waits for those that have not come to their end
    _longjmp(scheduler, 1);
}

// Runs until all of them are done; false where nobody can go on.
inline bool run(std::vector<std::unique_ptr<Thread>>& threads) {
    size_t left = threads.size();
    for (long rounds = 0; left; rounds++) {
        if (rounds > 200000) return false;
        for (auto& thread : threads) {
            if (thread->done) continue;
            resume(thread.get());
            left -= thread->done;
        }
    }
    return true;
}

inline bool run_cluster(int first_x, int y, int block, int size, size_t shared) {
    Cluster cluster;
    cluster.barrier.needed = size * block;
    std::vector<std::unique_ptr<Thread>> threads;
    for (int rank = 0; rank < size; rank++) {
        auto made = std::make_unique<Block>();
        *made = {first_x + rank, y, rank, std::vector<uint4>(shared / 16 + 1),
                 std::vector<Warp>(block / 32), {}, {}, &cluster};
        memset(made->memory.data(), 0xff, made->memory.size() * 16);  // not a number
        made->barrier.needed = block;
        made->computing.needed = block - 128;  // the last warps ask
        for (Warp& warp : made->warps) warp.barrier.needed = 32;
        for (int i = 0; i < block; i++) {
            auto thread = std::make_unique<Thread>();
            thread->stack.resize(64 * 1024);
            thread->block = made.get();
            thread->index = i;
            getcontext(&thread->context);
            thread->context.uc_stack.ss_sp = thread->stack.data();
            thread->context.uc_stack.ss_size = thread->stack.size();
            thread->context.uc_link = nullptr;
            makecontext(&thread->context, trampoline, 0);
            threads.push_back(std::move(thread));
        }
        cluster.blocks.push_back(std::move(made));
    }
    return run(threads);
}

struct GridSize {
    int x, y;
};
inline GridSize grid;

// One cluster after the other, in either order.
inline bool launch(int grid_x, int grid_y, int block, int cluster, size_t shared, bool backwards,
                   std::function<void()> kernel) {
    entry = std::move(kernel);
    grid = {grid_x, grid_y};
    const int across = grid_x / cluster, total = across * grid_y;
    for (int i = 0; i < total; i++) {
        const int which = backwards ? total - 1 - i : i;
        if (!run_cluster(which % across * cluster, which / across, block, cluster, shared))
            return false;
    }
    return true;
}

struct Index {
    int Block::*field;
    operator int() const { return current->block->*field; }
};
struct BlockIndex {
    Index x{&Block::x}, y{&Block::y};
};
struct ThreadIndex {
    struct X {
        operator u32() const { return current->index; }
    } x;
};

}  // namespace device

inline device::BlockIndex blockIdx;
#define gridDim (device::grid)
inline device::ThreadIndex threadIdx;
inline void __syncthreads() { device::current->block->barrier.wait(); }
inline void __syncwarp() { device::current->warp().barrier.wait(); }
inline void meet() { device::current->block->computing.wait(); }
inline device::Barrier& named_barrier(int which, int threads) {
    device::Barrier& barrier = device::current->block->named[which];
    barrier.needed = threads;
    return barrier;
}
inline void meet(int half) { named_barrier(1 + half, 128).wait(); }
inline void give_word(int which, int threads = 288) { named_barrier(which, threads).arrive(); }
inline void wait_for_word(int which, int threads = 288) { named_barrier(which, threads).wait(); }
inline int come(int* counter) { return (*counter)++; }
inline int seen(int* counter) { return *counter; }
inline void __threadfence() {}
inline int atomicAdd(int* p, int v) { return (*p += v) - v; }
#define SHARED_MEMORY (device::current->block->memory.data())

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcg(T* p, T value) { *p = value; }
inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
inline u32 __float_as_uint(float v) { u32 u; memcpy(&u, &v, 4); return u; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }

inline u32 rounded(float v) {
    u32 u = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
inline u32 pack(float lower, float upper) { return rounded(lower) | rounded(upper) << 16; }
inline uint4 stream(const uint4* p) { return *p; }
inline uint4 early(const uint4* p) { return *p; }
inline float power_of_2(float v) { return std::exp2(v); }

// What a warp does together: everybody's operands are there between two barriers.

template <class F> auto together(const device::Warp::Operands& mine, F&& result) {
    device::Warp& warp = device::current->warp();
    warp.of[device::current->lane()] = mine;
    warp.barrier.wait();
    auto value = result(warp.of, device::current->lane());
    warp.barrier.wait();
    return value;
}

template <class T> T __shfl_xor_sync(u32, T value, int distance) {
    device::Warp::Operands mine{};
    memcpy(mine.word, &value, sizeof(T));
    return together(mine, [&](auto& of, int lane) {
        T other;
        memcpy(&other, of[lane ^ distance].word, sizeof(T));
        return other;
    });
}

template <class T> T __shfl_sync(u32, T value, int from) {
    device::Warp::Operands mine{};
    memcpy(mine.word, &value, sizeof(T));
    return together(mine, [&](auto& of, int) {
        T other;
        memcpy(&other, of[from].word, sizeof(T));
        return other;
    });
}

inline int __reduce_min_sync(u32, int value) {
    device::Warp::Operands mine{};
    mine.word[0] = (u32)value;
    return together(mine, [](auto& of, int) {
        int least = (int)of[0].word[0];
        for (int i = 1; i < 32; i++) least = min(least, (int)of[i].word[0]);
        return least;
    });
}

inline bool __any_sync(u32, bool value) {
    device::Warp::Operands mine{};
    mine.word[0] = value;
    return together(mine, [](auto& of, int) {
        bool any = false;
        for (int i = 0; i < 32; i++) any |= of[i].word[0] != 0;
        return any;
    });
}

inline float half_of(u32 pair, int which) {
    return __uint_as_float(which ? pair & 0xffff0000u : pair << 16);
}

inline u32 weighted(u32 a, u32 b) {
    return pack(half_of(a, 0) * half_of(b, 0), half_of(a, 1) * half_of(b, 1));
}

inline void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    device::Warp::Operands mine{{a0, a1, a2, a3, b0, b1}, nullptr};
    together(mine, [&](auto& of, int lane) {
        const int g = lane / 4, t = lane % 4;
        for (int j = 0; j < 4; j++) {
            const int row = g + j / 2 * 8, column = 2 * t + j % 2;
            for (int k = 0; k < 16; k++) {
                const u32 a = of[row % 8 * 4 + k % 8 / 2].word[(row >= 8) + 2 * (k >= 8)];
                const u32 b = of[column * 4 + k % 8 / 2].word[4 + (k >= 8)];
                c[j] += half_of(a, k % 2) * half_of(b, k % 2);
            }
        }
        return 0;
    });
}

// Addresses of shared memory: the block of the cluster, and a place in it.

inline u32 address(const void* p) {
    device::Block* block = device::current->block;
    return (u32)block->rank << 24 | (u32)((const char*)p - (const char*)block->memory.data());
}
inline char* resolve(u32 where) {
    return (char*)device::current->block->cluster->blocks[where >> 24]->memory.data() +
           (where & 0xffffff);
}
inline void put_there(u32 where, float4 v) { *(float4*)resolve(where) = v; }
inline u32 of_block(u32 where, u32 block) { return block << 24 | (where & 0xffffff); }
inline u32 half_bits(float v) {
    int exponent;
    const float fraction = std::frexp(std::fabs(v), &exponent);
    const u32 bits = exponent > -14 ? (exponent + 14 << 10) + (u32)std::nearbyint(fraction * 2048) - 1024
                                    : (u32)std::nearbyint(std::ldexp(std::fabs(v), 24));
    return min(bits, 0x7c00u) | (v < 0 ? 0x8000u : 0);
}
inline float half_value(u32 bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float v = exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return bits & 0x8000 ? -v : v;
}
inline u32 to_halves(float lower, float upper) { return half_bits(lower) | half_bits(upper) << 16; }
inline float2 of_halves(u32 word) { return {half_value(word & 0xffff), half_value(word >> 16)}; }
inline void copy_piece(uint4* to, const uint4* from) { *to = *from; }


// Matrix instructions of a warpgroup. An operand lies in rows of 128 bytes, swizzled by address.
inline float element(u64 operand, int across, int row, int column) {
    const u32 leading = (operand >> 16 & 0x3fff) << 4, stride = (operand >> 32 & 0x3fff) << 4;
    u32 at = ((operand & 0x3fff) << 4) + across * leading + row / 8 * stride + row % 8 * 128 +
             column * 2;
    at ^= (at >> 7 & 7) << 4;
    u16 half;
    memcpy(&half, (char*)device::current->block->memory.data() + at, 2);
    return half_of(half, 0);
}
template <size_t Length> void score(float (&s)[Length][4], const u32 (&q)[4], u64 keys, int add) {
    together({{q[0], q[1], q[2], q[3]}, nullptr}, [&](auto& of, int lane) {
        for (size_t j = 0; j < Length; j++)
            for (int e = 0; e < 4; e++) {
                if (!add) s[j][e] = 0.f;
                for (int k = 0; k < 16; k++) {
                    const u32 pair = of[lane / 4 * 4 + k % 8 / 2].word[e / 2 + 2 * (k >= 8)];
                    const int key = j * 8 + lane % 4 * 2 + e % 2;
                    s[j][e] += half_of(pair, k % 2) * element(keys, 0, key, k);
                }
            }
        return 0;
    });
}
template <size_t Length> void weigh(float (&o)[Length][4], const u32 (&w)[4], u64 values) {
    together({{w[0], w[1], w[2], w[3]}, nullptr}, [&](auto& of, int lane) {
        for (size_t n = 0; n < Length; n++)
            for (int e = 0; e < 4; e++) {
                const int column = n * 8 + lane % 4 * 2 + e % 2;
                for (int k = 0; k < 16; k++) {
                    const u32 pair = of[lane / 4 * 4 + k % 8 / 2].word[e / 2 + 2 * (k >= 8)];
                    o[n][e] += half_of(pair, k % 2) * element(values, column / 64, k, column % 64);
                }
            }
        return 0;
    });
}

// The copy engine, from a map of our own: where a tensor lies, its rank, and of each dimension, the
// last one first, its size, its stride in bytes and that of the box. A barrier holds bytes that are
// missing, and its phase.
struct Landing {
    unsigned char arrivals, come, phase, unused;
    int missing;
};
inline void make_landing(u64* landed, int arrivals) {
    *(Landing*)landed = {(unsigned char)arrivals, 0, 0, 0, 0};
}
inline void show_landings() {}
template <class M> void look_at(const M*) {}
inline void land(u64* landed, int arrivals, int bytes) {
    Landing& landing = *(Landing*)landed;
    landing.come += arrivals, landing.missing += bytes;
    if (landing.come == landing.arrivals && !landing.missing) landing.come = 0, landing.phase ^= 1;
}
inline void arrive_at(u64* landed) { land(landed, 1, 0); }
inline void expect(u64* landed, int bytes) { land(landed, 1, bytes); }
inline void wait_for_landing(u64* landed, int phase) {
    while (((Landing*)landed)->phase == (u32)phase) device::yield();
}
inline void send(u32 to, const void* from, int bytes, u32 landed) {
    memcpy(resolve(to), from, bytes);
    land((u64*)resolve(landed), 0, -bytes);
}
// A box of a tensor, whose rows of 128 bytes arrive swizzled. ``at``: where it begins.
template <class M> void copy_from(char* to, const M* map, const long (&at)[4], u64* landed) {
    const auto* words = map->words;
    const int rank = (int)words[1];
    long size[4] = {1, 1, 1, 1}, stride[4] = {}, box[4] = {1, 1, 1, 1}, bytes = 0;
    for (int d = 0; d < rank; d++)
        size[d] = words[2 + 3 * d], stride[d] = words[3 + 3 * d], box[d] = words[4 + 3 * d];
    for (long d = 0; d < box[3]; d++)
        for (long c = 0; c < box[2]; c++)
            for (long b = 0; b < box[1]; b++)
                for (long a = 0; a < box[0]; a++, bytes += 2) {
                    const long place[4] = {at[0] + a, at[1] + b, at[2] + c, at[3] + d};
                    const char* from = (const char*)words[0];
                    bool inside = true;
                    for (int i = 0; i < 4; i++) {
                        inside &= place[i] < size[i];
                        from += place[i] * stride[i];
                    }
                    u32 there = address(to + bytes);
                    there ^= (there >> 7 & 7) << 4;
                    *(u16*)resolve(there) = inside ? *(const u16*)from : 0;
                }
    land(landed, 0, -(int)bytes);
}
template <class M>
void copy_page(uint4* to, const M* cache, int dim, int head, int slot, u64* landed) {
    copy_from((char*)to, cache, {dim, head, slot, 0}, landed);
}
template <class M>
void copy_box(void* to, const M* map, int column, int row, u64* landed, u64) {
    copy_from((char*)to, map, {column, row, 0, 0}, landed);
}
template <class M>
void copy_both(void* to, const M* map, int column, int eight, u64* landed, u64) {
    copy_from((char*)to, map, {column, 0, 0, eight}, landed);
}
template <int Count, int From, size_t Length>
void multiply_eights(float (&c)[Length][4], u64 w, u64 x) {
    const int index = device::current->index, lane = index % 32;
    for (int e = 0; e < Count; e++)
        for (int j = 0; j < 4; j++) {
            const int m = index % 128 / 32 * 16 + lane / 4 + j / 2 * 8, n = e * 8 + lane % 4 * 2 + j % 2;
            for (int k = 0; k < 16; k++) c[From + e][j] += element(w, 0, m, k) * element(x, 0, n, k);
        }
}
inline void begin_products() {}
inline void end_products() {}
inline void wait_for_products() {}
inline void wait_for_earlier_products() {}
inline void let_products_read() {}

// A cluster's barrier comes in two halves.
inline void arrive() {
    device::Thread* me = device::current;
    me->cluster_times = me->block->cluster->barrier.times;
    me->block->cluster->barrier.arrive();
}
inline void wait_for_all() {
    device::Thread* me = device::current;
    while (me->block->cluster->barrier.times == me->cluster_times) device::yield();
}
// Copies are over as soon as they are asked for, and launches do not overlap.
inline void wait_for_copies() {}
inline void let_next_begin() {}
inline void wait_for_previous() {}

// A kernel, and pointers to its arguments.
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_reference_t<A>*)arguments[I]...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}
