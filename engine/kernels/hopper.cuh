// What the kernels here say in Hopper's own instructions, each in a function of its own. Nothing else holds assembly, so that
// the kernels themselves can be compiled for a host that imitates these (tests/kernels/hopper_on_host.hpp).
//
// Given when compiled: BFLOAT16 (else float16), the 16-bit type of a pair.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// What the bulk copy engine knows of a matrix.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// Cache policies of the copy engine.
constexpr u64 EVICT_NORMAL = 0x1000000000000000ull;
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;
constexpr u64 EVICT_LAST = 0x14F0000000000000ull;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void* shared_pointer(u32 address) { return __cvta_shared_to_generic(address); }

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 peer_address(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// All CTAs of the cluster have come here; what they wrote to shared memory is visible.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}

// The same without a promise about memory, which would wait for every store to get home.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed;\n barrier.cluster.wait;" ::: "memory");
}

__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void release_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    }
}

__device__ __forceinline__ void arrive_at_peer(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_address(barrier, rank)) : "memory");
}

__device__ __forceinline__ void load_tile(u32 target, const TensorMap* map, int k, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(target),
        "l"(map), "r"(k), "r"(row), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void load_box(u32 target, const TensorMap* map, int x, int y, int z, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
        : "memory");
}

__device__ __forceinline__ void load_tile_for_all(
    u32 target, const TensorMap* map, int k, int row, u32 barrier, u64 policy, u16 peers) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(target),
        "l"(map), "r"(k), "r"(row), "r"(barrier), "h"(peers), "l"(policy)
        : "memory");
}

// Counts an arrival at a place in global memory and returns how many came before: what this warp wrote before it is there for
// whoever comes after, and what they wrote is there for this warp.
__device__ __forceinline__ int arrive_at(int* count) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(count) : "memory");
    return before;
}

// An operand of 128-byte rows whose 16-byte parts are swizzled in groups of eight rows, as the copy engine leaves them.
__device__ __forceinline__ u64 operand(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ u32 to_pair(float low, float high) {
    u32 pair;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

__device__ __forceinline__ float2 from_pair(u32 pair) {
#if BFLOAT16
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
#else
    float2 both;
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
        : "=f"(both.x), "=f"(both.y)
        : "r"(pair));
    return both;
#endif
}

// After the barriers' initialisation, before peers or the copy engine may use them.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The registers of a warpgroup's threads from here on.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Around the asynchronous products of a warpgroup: before the first of a group, behind its last, and until at most `LEFT`
// groups run.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// No instruction that touches a sum moves past this.
template <int COUNT>
__device__ __forceinline__ void pin(float (&acc)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// Some warps of a CTA wait for each other.
template <int THREADS>
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

__device__ __forceinline__ float4 load_from_peer(u32 address, u32 rank) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(peer_address(address, rank)));
    return v;
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory, lane by lane a row's address; plain, or each transposed. Of a
// matrix a lane holds two neighbours: row lane / 4, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

// One such matrix, transposed.
__device__ __forceinline__ u32 transposed(u32 matrix) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}

// c += a b, of 16 x 16 and 16 x 8: a as its quarters (rows 0, rows 8; the same behind column 8), b as its upper and lower half,
// transposed, c as rows lane / 4 and 8 more, columns 2 (lane % 4) and the next.
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BFLOAT16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
