// A kernel in CUDA C++ on the host, without its hardware: every thread of a cluster is a fiber, and what hopper.cuh has in
// Hopper's instructions is imitated. Copies arrive late and in any order, products read their operands as late as they may, so that
// a missing wait is a wrong result and a missing arrival a deadlock that is reported. bfloat16 only.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __shared__
#define __launch_bounds__(...)

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint2 {
    u32 x, y;
};
struct int4 {
    int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float __expf(float v) { return std::exp(v); }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __int_as_float(int bits) {
    float v;
    std::memcpy(&v, &bits, 4);
    return v;
}
template <class T>
inline T __ldcg(const T* from) {
    return *from;
}
inline int arrive_at(int* count) { return (*count)++; }
using std::min;

// A matrix of 16-bit numbers, and the box of it that one copy loads: 64 columns, or 64 times `across` whose pieces lie behind one
// another.
struct TensorMap {
    const u16* base;
    long rows, columns, stride;
    int box_rows;
    bool is_input;  // written by the kernel before: nobody may load it ahead of the wait
    int across = 1;
};

static unsigned char memory[1];  // what the kernel declares; `shared_address` knows better

namespace host {

constexpr int SHARED_BYTES = 256 << 10, STACK_BYTES = 64 << 10;
constexpr u32 OFFSET = 0xFFFFF;  // of an address; above it the CTA's rank

struct Dim {
    int x;
};

struct Meeting {
    int here = 0;
    long times = 0;
};

struct Barrier {
    int count = 0, pending = 0;
    long bytes = 0, phases = 0;
};

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    int rank, index;
    bool is_done = false, has_waited = false;
    std::vector<std::vector<std::function<void()>>> products;
};

struct Machine {
    ucontext_t main;
    std::vector<Thread> threads;
    std::vector<std::vector<unsigned char>> shared;
    std::map<std::pair<int, int>, Meeting> meetings;
    std::map<u32, Barrier> barriers;
    std::vector<std::function<void()>> copies;
    std::vector<u64> words;  // what the lanes of a warp show each other
    std::function<void()> kernel;
    std::mt19937 random;
    std::string error;
    int current = 0, threads_a_cta = 0, cluster = 0, grid = 0, block = 0;
    long idle = 0;
    bool is_lazy = false;  // copies come when nobody can go on without
};

inline Machine machine;

inline Thread& self() { return machine.threads[machine.current]; }

inline void fail(const std::string& error) {
    machine.error = error;
    setcontext(&machine.main);
}

inline void progress() { machine.idle = 0; }

inline void switch_to_next() {
    const int before = machine.current, count = static_cast<int>(machine.threads.size());
    for (int step = 1; step <= count; ++step) {
        const int next = (before + step) % count;
        if (machine.threads[next].is_done) continue;
        machine.current = next;
        if (next != before) swapcontext(&machine.threads[before].context, &machine.threads[next].context);
        return;
    }
    setcontext(&machine.main);
}

inline void copy_some(bool must) {
    auto& copies = machine.copies;
    if (copies.empty() || (!must && (machine.is_lazy || machine.random() % 8))) return;
    const size_t at = machine.random() % copies.size();
    const auto copy = copies[at];
    copies.erase(copies.begin() + at);
    copy();
    progress();
}

inline void wait_until(const std::function<bool()>& holds, const char* what) {
    const int me = machine.current;
    while (!holds()) {
        const long all = static_cast<long>(machine.threads.size());
        if (++machine.idle > 4 * all) copy_some(true);
        if (machine.idle > 16 * all) fail(std::string("deadlock: a thread waits for ") + what);
        copy_some(false);
        switch_to_next();
        machine.current = me;
    }
    progress();
}

inline void meet(int group, int id, int count) {
    Meeting& meeting = machine.meetings[{group, id}];
    const long times = meeting.times;
    if (++meeting.here == count) {
        meeting.here = 0, ++meeting.times;
        progress();
    } else {
        wait_until([&] { return meeting.times != times; }, "others at a barrier");
    }
}

inline void meet_warp() { meet(self().rank * 64 + self().index / 32, 2, 32); }

inline unsigned char* at(u32 address) { return &machine.shared[address >> 20][address & OFFSET]; }

inline void settle(Barrier& barrier) {
    if (barrier.pending < 0) fail("a barrier had more arrivals than it counts");
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.pending = barrier.count, ++barrier.phases;
    progress();
}

inline float from_16(u16 v) {
    const u32 bits = static_cast<u32>(v) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline u16 to_16(float f) {
    u32 bits;
    std::memcpy(&bits, &f, 4);
    return static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// An element of an operand whose 16-byte parts are swizzled in groups of eight rows.
inline float element(u64 operand, int row, int column) {
    const u32 address = static_cast<u32>(operand << 4) + row * 128 + column * 2;
    u16 value;
    std::memcpy(&value, at((address ^ ((address >> 7 & 7) << 4))), 2);
    return from_16(value);
}

inline void copy_to(u32 target, const TensorMap& map, int column, int row, u32 barrier) {
    for (int r = 0; r < map.box_rows; ++r) {
        for (int c = 0; c < 64 * map.across; ++c) {
            const u32 address = target + (r * map.across + c / 64) * 128 + c % 64 * 2;
            const bool inside = row + r < map.rows && column + c < map.columns;
            const u16 value = inside ? map.base[(row + r) * map.stride + column + c] : u16(0);
            std::memcpy(at(address ^ ((address >> 7 & 7) << 4)), &value, 2);
        }
    }
    machine.barriers[barrier].bytes -= map.box_rows * map.across * 128;
    settle(machine.barriers[barrier]);
}

inline void send(u32 target, const TensorMap* map, int column, int row, u32 barrier) {
    if (target % 1024) fail("a copy's target is not aligned to 1024 bytes");
    if (map->is_input && !self().has_waited) fail("an input was loaded ahead of the wait");
    machine.copies.push_back([=] { copy_to(target, *map, column, row, barrier); });
}

inline void enter() {
    machine.kernel();
    self().is_done = true;
    progress();
    switch_to_next();
}

// Runs the clusters of a grid, one after the other. Returns what went wrong, or nothing.
inline const char* launch(int grid, int cluster, int threads, unsigned seed, const std::function<void()>& kernel) {
    Machine& m = machine;
    m.error.clear(), m.random.seed(seed), m.is_lazy = seed % 2 == 0, m.kernel = kernel;
    m.grid = grid, m.cluster = cluster, m.threads_a_cta = threads;
    for (m.block = 0; m.block < grid && m.error.empty(); m.block += cluster) {
        m.meetings.clear(), m.barriers.clear(), m.copies.clear(), m.idle = 0;
        m.shared.assign(cluster, std::vector<unsigned char>(SHARED_BYTES, 0xFF));
        m.threads = std::vector<Thread>(cluster * threads);
        m.words.assign(cluster * threads, 0);
        for (int i = 0; i < cluster * threads; ++i) {
            Thread& thread = m.threads[i];
            thread.rank = i / threads, thread.index = i % threads, thread.stack.resize(STACK_BYTES);
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.data(), thread.context.uc_stack.ss_size = STACK_BYTES;
            thread.context.uc_link = nullptr;
            makecontext(&thread.context, enter, 0);
        }
        m.current = 0;
        volatile bool is_back = false;
        getcontext(&m.main);
        if (!is_back) {
            is_back = true;
            setcontext(&m.threads[0].context);
        }
        if (m.error.empty() && !m.copies.empty()) m.error = "a CTA was gone before all copies into it had come";
    }
    return m.error.empty() ? nullptr : m.error.c_str();
}

}  // namespace host

#define threadIdx (host::Dim{host::self().index})
#define blockIdx (host::Dim{host::machine.block + host::self().rank})
#define gridDim (host::Dim{host::machine.grid})

template <class T>
inline T __shfl_sync(u32, T value, int lane) {
    u64* words = &host::machine.words[host::machine.current / 32 * 32];
    std::memcpy(&words[host::self().index % 32], &value, sizeof value);
    host::meet_warp();
    T result;
    std::memcpy(&result, &words[lane % 32], sizeof result);
    host::meet_warp();
    return result;
}

template <class T>
inline T __shfl_xor_sync(u32, T value, int across) {
    return __shfl_sync(0, value, host::self().index % 32 ^ across);
}

inline bool __any_sync(u32, bool holds) {
    bool any = false;
    for (int lane = 0; lane < 32; ++lane) any |= __shfl_sync(0, holds, lane);
    return any;
}

inline void __syncwarp() { host::meet_warp(); }

inline void __syncthreads() { host::meet(host::self().rank, 0, host::machine.threads_a_cta); }

template <int THREADS>
inline void meet() {
    host::meet(host::self().rank, 1, THREADS);
}

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
