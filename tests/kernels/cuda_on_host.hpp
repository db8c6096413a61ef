// A kernel in CUDA C++ on the host, without its hardware: every thread of a cluster is a fiber, clusters come in any order.
// Copies arrive late and in any order, products read their operands as late as they may, so that a missing wait is a wrong
// result and a missing arrival a deadlock that is reported. Before hopper_on_host.hpp. bfloat16 only.

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

// A matrix of 16-bit numbers, and the box of it that one copy loads: 64 columns, or `across` times 64, the pieces of a row
// behind one another.
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

// Runs the clusters of a grid, one after the other in any order. Returns what went wrong, or nothing.
inline const char* launch(int grid, int cluster, int threads, unsigned seed, const std::function<void()>& kernel) {
    Machine& m = machine;
    m.error.clear(), m.random.seed(seed), m.is_lazy = seed % 2 == 0, m.kernel = kernel;
    m.grid = grid, m.cluster = cluster, m.threads_a_cta = threads;
    std::vector<int> first_blocks;
    for (int block = 0; block < grid; block += cluster) first_blocks.push_back(block);
    std::shuffle(first_blocks.begin(), first_blocks.end(), m.random);
    for (const int block : first_blocks) {
        if (!m.error.empty()) break;
        m.block = block;
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
