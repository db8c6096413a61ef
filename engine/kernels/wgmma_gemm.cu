// y = x @ W.T on Hopper. Behind hopper.cuh.
//
// A CTA computes tiles of y, each of BM rows of x and BN rows of W. Its first warpgroup is the producer: one thread of it sends
// for tiles of W and of x by the bulk copy engine, through a ring of stages in shared memory. Each further warpgroup multiplies
// 64 rows. Tiles that meet the same rows of W follow one another, so W passes through the chip once where all rows fit a tile,
// and comes from the L2 otherwise.
//
// `BLOCKS` CTAs of a cluster compute different rows with the same tile of W; each loads a piece of it for all of them. `SPLIT`
// CTAs share the sum over K of one tile, and add their parts through distributed shared memory, in the order of K.
//
// What bounds it beside the memory is shared memory: an instruction for 64 rows reads its tile of W for itself. So tiles are as
// wide as the registers allow.
//
// Dependent launch (dependent_launch.py): W is sent for before the wait, everything else after it.
//
// Given when compiled: ROW_GROUPS (warpgroups of 64 rows), BN, STAGES, BLOCKS, SPLIT, RESIDENT (CTAs that fit a
// multiprocessor), PIECES (copies that a tile of W takes), N (features of y), K, SILU (W holds a gate and an up half of N rows
// each), ADD (y is added to what is there), BFLOAT16 (else float16), and WGMMA(acc, x, w, accumulate), the instruction for 64
// rows of x, BN rows of W and 16 of K.

constexpr int BK = 64;  // 128 bytes: the width of a swizzled row
constexpr int BM = 64 * ROW_GROUPS;
constexpr int CLUSTER = BLOCKS * SPLIT;
constexpr int TILE = SILU ? BN / 2 : BN;
constexpr int TILES = (N + TILE - 1) / TILE;
constexpr int STEPS = (K + BK * SPLIT - 1) / (BK * SPLIT);
constexpr int PIECE_ROWS = BN / PIECES;
static_assert(BN % (8 * PIECES) == 0, "a piece is whole groups of swizzled rows");
static_assert(!SILU || PIECES == 2, "a half of gates, a half of ups");
constexpr int X_BYTES = BM * BK * 2;
constexpr int W_BYTES = BN * BK * 2;
constexpr int STAGE_BYTES = X_BYTES + W_BYTES;
constexpr int UP = SILU ? BN / 4 : 0;  // from a gate's sum to that of its up
constexpr int SUM_STRIDE = BN + 8;  // floats; the 8 spread a quad's rows over the banks
constexpr int CONSUMER_REGISTERS = ROW_GROUPS == 1 ? 248 : ROW_GROUPS == 2 ? 232 : ROW_GROUPS == 3 ? 160 : 112;
constexpr int PRODUCER_REGISTERS = ROW_GROUPS <= 2 ? 40 : 24;

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

struct Ring {
    u32 base, barriers;
    __device__ u32 x(int stage) const { return base + stage * STAGE_BYTES; }
    __device__ u32 w(int stage) const { return base + stage * STAGE_BYTES + X_BYTES; }
    __device__ u32 full(int stage) const { return barriers + 8 * stage; }
    __device__ u32 empty(int stage) const { return barriers + 8 * (STAGES + stage); }
};

// One thread: fills the ring for every step of every tile of this CTA.
struct Producer {
    const TensorMap* x_map;
    const TensorMap* w_map;
    Ring ring;
    int first_tile, num_clusters, row_tiles, block, split;

    __device__ void send_w(int step) const {
        const int stage = step % STAGES;
        const int tile = (first_tile + step / STEPS * num_clusters) / row_tiles;
        const int k = (split * STEPS + step % STEPS) * BK;
        const u64 policy = row_tiles == 1 ? EVICT_FIRST : EVICT_NORMAL;
        expect_bytes(ring.full(stage), STAGE_BYTES);
        if (BLOCKS > 1) {
            const u16 peers = static_cast<u16>(((1 << BLOCKS) - 1) << (split * BLOCKS));
            load_tile_for_all(piece(stage, block), w_map, k, piece_row(tile, block), ring.full(stage), policy, peers);
        } else {
            for (int i = 0; i < PIECES; ++i) {
                load_tile(piece(stage, i), w_map, k, piece_row(tile, i), ring.full(stage), policy);
            }
        }
    }

    __device__ void send_x(int step) const {
        const int stage = step % STAGES;
        const int row_tile = (first_tile + step / STEPS * num_clusters) % row_tiles;
        const int k = (split * STEPS + step % STEPS) * BK;
        load_tile(ring.x(stage), x_map, k, (row_tile * BLOCKS + block) * BM, ring.full(stage), EVICT_LAST);
    }

    __device__ u32 piece(int stage, int i) const { return ring.w(stage) + i * (W_BYTES / PIECES); }
    __device__ int piece_row(int tile, int i) const { return SILU ? i * N + tile * TILE : tile * TILE + i * PIECE_ROWS; }
};

__device__ __forceinline__ void produce(const Producer& producer, int num_steps) {
    const Ring& ring = producer.ring;
    const int ahead = num_steps < STAGES ? num_steps : STAGES;
    for (int step = 0; step < ahead; ++step) producer.send_w(step);
    wait_for_inputs();
    for (int step = 0; step < ahead; ++step) producer.send_x(step);
    for (int step = ahead; step < num_steps; ++step) {
        wait_barrier(ring.empty(step % STAGES), (step / STAGES - 1) & 1);
        producer.send_w(step);
        producer.send_x(step);
    }
    // This CTA stays until its peers have said all that they say to its barriers.
    for (int step = num_steps - ahead; step < num_steps; ++step) {
        wait_barrier(ring.empty(step % STAGES), (step / STAGES) & 1);
    }
}

// Where a thread of a consumer stands: in an accumulator acc[4 j + 2 h + i] is row `row` + 8 h of the CTA's, column `column` +
// 8 j + i of its tile.
struct Consumer {
    int row_group, thread, lane, row, column;
    __device__ explicit Consumer(int row_group)
        : row_group(row_group),
          thread(threadIdx.x % 128),
          lane(thread % 32),
          row(row_group * 64 + thread / 32 * 16 + lane / 4),
          column(lane % 4 * 2) {}
};

// One tile's sums, from the steps `step` and on; returns the step behind them.
__device__ __forceinline__ int multiply(float (&acc)[BN / 2], const Ring& ring, int step, const Consumer& me, int split) {
    for (int inner = 0; inner < STEPS; ++inner, ++step) {
        const int stage = step % STAGES;
        wait_barrier(ring.full(stage), (step / STAGES) & 1);
        const u64 x = operand(ring.x(stage) + me.row_group * 64 * 128), w = operand(ring.w(stage));
        pin(acc);
        begin_products();
        WGMMA(acc, x, w, inner != 0);  // 16 of K are 32 bytes, two units of an operand's address
        WGMMA(acc, x + 2, w + 2, 1);
        WGMMA(acc, x + 4, w + 4, 1);
        WGMMA(acc, x + 6, w + 6, 1);
        end_products();
        if (inner > 0) {
            // The step before this one has been read: its stage may be filled again.
            wait_for_products<1>();
            if (me.lane < BLOCKS) arrive_at_peer(ring.empty((step - 1) % STAGES), split * BLOCKS + me.lane);
        }
    }
    wait_for_products<0>();
    pin(acc);
    if (me.lane < BLOCKS) arrive_at_peer(ring.empty((step - 1) % STAGES), split * BLOCKS + me.lane);
    return step;
}

// `out` begins at the CTA's first row and the tile's first column; `rows` and `columns` are left from there.
__device__ __forceinline__ void store(
    const float (&acc)[BN / 2], u16* out, int out_stride, int rows, int columns, const Consumer& me) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = me.row + 8 * half;
        if (row >= rows) continue;
        u16* target = out + static_cast<long long>(row) * out_stride + me.column;
#pragma unroll
        for (int j = 0; j < TILE / 8; ++j) {
            if (N % TILE != 0 && 8 * j >= columns) continue;
            float low = acc[4 * j + 2 * half], high = acc[4 * j + 2 * half + 1];
            if (SILU) {
                const float2 gate = from_pair(to_pair(silu(low), silu(high)));
                low = gate.x * acc[4 * j + UP + 2 * half], high = gate.y * acc[4 * j + UP + 2 * half + 1];
            }
            u32* pair = reinterpret_cast<u32*>(target + 8 * j);
            if (ADD) {
                const float2 before = from_pair(*pair);
                low += before.x, high += before.y;
            }
            *pair = to_pair(low, high);
        }
    }
}

// The first half of a split sum's end: each CTA leaves its part in its own shared memory.
__device__ __forceinline__ void keep(const float (&acc)[BN / 2], float* sums, const Consumer& me) {
    // All warpgroups of this CTA have read their last stage: the ring's memory takes the sums.
    meet<128 * ROW_GROUPS>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* target = sums + (me.row + 8 * half) * SUM_STRIDE + me.column;
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            *reinterpret_cast<float2*>(target + 8 * j) = make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]);
        }
    }
}

// The other half: each CTA of the split adds up a share of the tile. `sums` is the address of this CTA's part.
__device__ __forceinline__ void add_up(
    u32 sums, u16* out, int out_stride, int rows, int columns, const Consumer& me, int block, int split) {
    constexpr int QUADS = BM * BN / 4, SHARE = (QUADS + SPLIT - 1) / SPLIT;
    const int end = QUADS < (split + 1) * SHARE ? QUADS : (split + 1) * SHARE;
    for (int quad = split * SHARE + me.row_group * 128 + me.thread; quad < end; quad += 128 * ROW_GROUPS) {
        const int row = quad / (BN / 4), column = quad % (BN / 4) * 4;
        if (row >= rows || column >= columns) continue;
        const u32 mine = sums + (row * SUM_STRIDE + column) * 4;
        float4 part[SPLIT];
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) {
            part[other] = load_from_peer(mine, other * BLOCKS + block);
        }
        float4 sum = part[0];
#pragma unroll
        for (int other = 1; other < SPLIT; ++other) {
            sum.x += part[other].x, sum.y += part[other].y, sum.z += part[other].z, sum.w += part[other].w;
        }
        uint2* target = reinterpret_cast<uint2*>(out + static_cast<long long>(row) * out_stride + column);
        if (ADD) {
            const float2 left = from_pair(target->x), right = from_pair(target->y);
            sum.x += left.x, sum.y += left.y, sum.z += right.x, sum.w += right.y;
        }
        *target = make_uint2(to_pair(sum.x, sum.y), to_pair(sum.z, sum.w));
    }
}

extern "C" __global__ void __launch_bounds__(128 * (ROW_GROUPS + 1), RESIDENT) wgmma_gemm(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, u16* out, int rows, int out_stride) {
    extern __shared__ unsigned char memory[];
    const u32 base = (shared_address(memory) + 1023) & ~1023u;
    const Ring ring{base, base + STAGES * STAGE_BYTES};
    const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    const int rank = CLUSTER == 1 ? 0 : cluster_rank();
    const int block = rank % BLOCKS, split = rank / BLOCKS;
    const int first_tile = blockIdx.x / CLUSTER, num_clusters = gridDim.x / CLUSTER;
    const int row_tiles = (rows + BM * BLOCKS - 1) / (BM * BLOCKS);
    const int num_tiles = (TILES * row_tiles - first_tile + num_clusters - 1) / num_clusters;

    if (threadIdx.x == 0) {
        prefetch_map(&w_map);
        prefetch_map(&x_map);
        for (int stage = 0; stage < STAGES; ++stage) {
            init_barrier(ring.full(stage), 1);
            init_barrier(ring.empty(stage), BLOCKS * ROW_GROUPS * 4);
        }
        publish_barriers();
    }
    if (CLUSTER > 1) {
        cluster_meet();
    } else {
        __syncthreads();
    }

    if (warpgroup == 0) {
        if (RESIDENT == 1) give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            const Producer producer{&x_map, &w_map, ring, first_tile, num_clusters, row_tiles, block, split};
            produce(producer, num_tiles * STEPS);
        }
        if (SPLIT > 1) {
            cluster_sync();
            cluster_meet();
        }
        return;
    }
    if (RESIDENT == 1) take_registers<CONSUMER_REGISTERS>();
    wait_for_inputs();
    release_dependents();
    const Consumer me(warpgroup - 1);
    float acc[BN / 2];
    int step = 0;
    for (int tile = first_tile; tile < TILES * row_tiles; tile += num_clusters) {
        const int first_row = (tile % row_tiles * BLOCKS + block) * BM, first_column = tile / row_tiles * TILE;
        u16* corner = out + static_cast<long long>(first_row) * out_stride + first_column;
        step = multiply(acc, ring, step, me, split);
        if (SPLIT == 1) {
            store(acc, corner, out_stride, rows - first_row, N - first_column, me);
        } else {  // one tile only: the ring's memory is needed for the sums
            keep(acc, static_cast<float*>(shared_pointer(base)), me);
            cluster_sync();
            add_up(base, corner, out_stride, rows - first_row, N - first_column, me, block, split);
            cluster_meet();  // nobody reads this CTA's sums any more
        }
    }
}
