// What hopper.cuh has in Hopper's instructions, imitated on the host. Behind cuda_on_host.hpp.

constexpr u64 EVICT_NORMAL = 0, EVICT_FIRST = 1, EVICT_LAST = 2;
inline u32 shared_address(const void*) { return static_cast<u32>(host::self().rank) << 20; }
inline void* shared_pointer(u32 address) { return host::at(address); }
inline u32 cluster_rank() { return host::self().rank; }
inline u32 peer_address(u32 address, u32 rank) { return (address & host::OFFSET) | rank << 20; }
inline void cluster_sync() { host::meet(-1, 0, static_cast<int>(host::machine.threads.size())); }
inline void cluster_meet() { cluster_sync(); }
inline void wait_for_inputs() { host::self().has_waited = true; }
inline void release_dependents() {}
inline void init_barrier(u32 barrier, u32 count) { host::machine.barriers[barrier] = {int(count), int(count)}; }
inline void publish_barriers() {}
inline void prefetch_map(const TensorMap*) {}
template <int COUNT>
inline void give_registers() {}
template <int COUNT>
inline void take_registers() {}

inline void expect_bytes(u32 barrier, u32 bytes) {
    host::Barrier& there = host::machine.barriers[barrier];
    there.bytes += bytes, --there.pending;
    host::settle(there);
}

inline void wait_barrier(u32 barrier, u32 parity) {
    host::Barrier& there = host::machine.barriers[barrier];
    host::wait_until([&] { return (there.phases & 1) != parity; }, "a phase of a barrier");
}

inline void arrive_at_peer(u32 barrier, u32 rank) {
    if (host::machine.threads[rank * host::machine.threads_a_cta].is_done) host::fail("an arrival at a CTA that has ended");
    host::Barrier& there = host::machine.barriers[peer_address(barrier, rank)];
    --there.pending;
    host::settle(there);
}

inline void load_tile(u32 target, const TensorMap* map, int k, int row, u32 barrier, u64) {
    host::send(target, map, k, row, barrier);
}

inline void load_box(u32 target, const TensorMap* map, int, int y, int z, u32 barrier, u64) {
    host::send(target, map, y * 64, z, barrier);
}

inline void load_tile_for_all(u32 target, const TensorMap* map, int k, int row, u32 barrier, u64, u16 peers) {
    for (u32 rank = 0; rank < 16; ++rank) {
        if (peers >> rank & 1) host::send(peer_address(target, rank), map, k, row, peer_address(barrier, rank));
    }
}

inline u64 operand(u32 address) { return address >> 4; }
inline u32 to_pair(float low, float high) { return host::to_16(low) | static_cast<u32>(host::to_16(high)) << 16; }
inline float2 from_pair(u32 pair) { return {host::from_16(pair & 0xFFFF), host::from_16(pair >> 16)}; }

inline float4 load_from_peer(u32 address, u32 rank) {
    float4 v;
    std::memcpy(&v, host::at(peer_address(address, rank)), 16);
    return v;
}

template <int COUNT>
inline void pin(float (&)[COUNT]) {}

inline void begin_products() { host::self().products.emplace_back(); }
inline void end_products() {}

template <int LEFT>
inline void wait_for_products() {
    auto& products = host::self().products;
    while (products.size() > LEFT) {
        for (const auto& product : products.front()) product();
        products.erase(products.begin());
    }
}

// What a thread of a warpgroup holds of 64 rows of x times COUNT * 2 rows of W, 16 of the inner side.
template <int COUNT>
inline void WGMMA(float (&acc)[COUNT], u64 x, u64 w, bool accumulate) {
    float* sums = acc;
    host::self().products.back().push_back([=] {
        const int thread = host::self().index % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
        for (int i = 0; i < COUNT; ++i) {
            const int r = row + i % 4 / 2 * 8, c = i / 4 * 8 + column + i % 2;
            float sum = accumulate ? sums[i] : 0.0f;
            for (int k = 0; k < 16; ++k) sum += host::element(x, r, k) * host::element(w, c, k);
            sums[i] = sum;
        }
    });
}

namespace host {

// A matrix of 8 rows of a lane's address each: two neighbours of a row, or of a column.
inline void load_four(u32 (&a)[4], u32 address, bool is_transposed) {
    if (address % 16) fail("a matrix row is not aligned to 16 bytes");
    const int lane = self().index % 32, r = lane / 4, c = lane % 4 * 2;
    u64* words = &machine.words[machine.current / 32 * 32];
    words[lane] = address;
    meet_warp();
    for (int m = 0; m < 4; ++m) {
        u16 first, second;
        std::memcpy(&first, at(words[8 * m + (is_transposed ? c : r)]) + 2 * (is_transposed ? r : c), 2);
        std::memcpy(&second, at(words[8 * m + (is_transposed ? c + 1 : r)]) + 2 * (is_transposed ? r : c + 1), 2);
        a[m] = first | static_cast<u32>(second) << 16;
    }
    meet_warp();
}

inline float half_of(u32 pair, int which) { return from_16(which ? pair >> 16 : pair & 0xFFFF); }

}  // namespace host

inline void load_matrices(u32 (&a)[4], u32 address) { host::load_four(a, address, false); }
inline void load_matrices_transposed(u32 (&a)[4], u32 address) { host::load_four(a, address, true); }

inline u32 transposed(u32 matrix) {
    const int row = host::self().index % 32 / 4, column = host::self().index % 4 * 2;
    u32 result = 0;
    for (int lane = 0; lane < 32; ++lane) {
        const u32 there = __shfl_sync(0, matrix, lane);
        for (int j = 0; j < 2; ++j) {
            const u16 value = j ? there >> 16 : there & 0xFFFF;
            if (lane % 4 * 2 + j == row && lane / 4 == column) result |= value;
            if (lane % 4 * 2 + j == row && lane / 4 == column + 1) result |= static_cast<u32>(value) << 16;
        }
    }
    return result;
}

inline void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    u32 all[32][6];
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) all[lane][i] = __shfl_sync(0, a[i], lane);
        all[lane][4] = __shfl_sync(0, b0, lane), all[lane][5] = __shfl_sync(0, b1, lane);
    }
    const int thread = host::self().index % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = thread / 4 + i / 2 * 8, column = thread % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const float x = host::half_of(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2);
            c[i] += x * host::half_of(all[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
        }
    }
}
