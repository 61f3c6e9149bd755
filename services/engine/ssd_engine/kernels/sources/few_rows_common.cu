// What the kernels of a few rows share; it stands before each of them.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

__device__ __forceinline__ u32 pack(float lower, float upper) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}

__device__ __forceinline__ uint4 stream(const uint4* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
    return v;
}

__device__ __forceinline__ void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The next kernel of the stream may begin; what it reads of this one it must wait for.
__device__ __forceinline__ void let_next_begin() {
    asm volatile("griddepcontrol.launch_dependents;");
}

// From here on, what the kernels before this one have written can be read.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 weighted(u32 pair, u32 norm) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(norm));
    return product;
}

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Matrix instructions of a warpgroup: 64 rows. They run on beside what follows until waited for.

// 64 bits that say where an operand lies: panels, or groups of eight rows of one, are so far apart.
__device__ __forceinline__ u64 operand(const void* panel, int panels_apart) {
    return (u64)(address(panel) >> 4 & 0x3fffu) | (u64)(panels_apart >> 4) << 16 |
           (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

#define FOUR(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 1), FOUR(c, i + 2), FOUR(c, i + 3)
#define IN_16 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define IN_32 \
    IN_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define IN_64 \
    IN_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
    "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// A cluster: blocks that run side by side. Where something of this block lies in another one, and a
// barrier of all threads that have not come to their end.

__device__ __forceinline__ u32 of_block(u32 where, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(where), "r"(block));
    return there;
}

__device__ __forceinline__ void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_all() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The copy engine. It finds a tensor by its map, and tells a barrier what has landed.

struct alignas(64) Map {
    u64 words[16];
};

__device__ __forceinline__ void make_landing(u64* landed, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(landed)), "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void arrive_at(u64* landed) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(landed)) : "memory");
}

__device__ __forceinline__ void show_landings() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(u64* landed, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(landed)),
                 "r"(bytes) : "memory");
}

// All lanes of a warp go on together: matrix instructions need them so.
__device__ __forceinline__ void wait_for_landing(u64* landed, int phase) {
    u32 over;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
                     "selp.u32 %0, 1, 0, p;}"
                     : "=r"(over) : "r"(address(landed)), "r"(phase) : "memory");
    } while (!__all_sync(0xffffffffu, over));
}

__device__ __forceinline__ void look_at(const Map* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
