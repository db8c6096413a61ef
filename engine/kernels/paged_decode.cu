// Attention of one query token a row over its pages, on Hopper, for many sequences.
//
// A warp is a CTA and walks a share of the step's KV blocks (decode_plan.py), 16 tokens of one KV head each. The bulk copy
// engine fills its ring of stages, across the borders of sequences: the next one's first blocks are on their way while this one
// is computed, so nothing is drained between them. Scores are keys times queries and results are values times weights, with
// tokens and dimensions as the tall side, because a KV head has few queries. Behind hopper.cuh and head_vector.cuh.
//
// Given when compiled: G (queries of a KV head, up to 8), HK, D (64 or 128), PAGE (a multiple of 16), STAGES, ROPE, NORM,
// AHEAD, BFLOAT16.

constexpr int BT = 16;
constexpr int HQ = HK * G;
constexpr int HALVES = D / 64;
constexpr int HALF_BYTES = BT * 128;
constexpr int STAGE_BYTES = 2 * HALVES * HALF_BYTES;
constexpr float LOWEST = -1e30f;

struct Arguments {
    const u16* q;
    u16* k_cache;
    u16* v_cache;
    u16* out;
    const int* table;
    const int* rows;
    const int* seq_lens;
    const int* plan;
    const int* share;
    float* partial_out;
    float* partial_stats;
    int* arrivals;
    const u16* q_norm;
    const u16* k_norm;
    const float* cos_sin;
    float scale, eps;
    int q_stride, out_stride, table_stride, num_rows;
};

// Running softmax of a lane: for queries 2 (lane % 4) + j, the largest score and this lane's part of the weight; and
// acc[t][2 h + j], dimension 16 t + 8 h + lane / 4.
struct Softmax {
    float best[2], weight[2];
    float acc[KS][4];
};

__device__ __forceinline__ Softmax nothing() {
    Softmax x;
    x.best[0] = x.best[1] = LOWEST;
    x.weight[0] = x.weight[1] = 0.0f;
#pragma unroll
    for (int t = 0; t < KS; ++t) x.acc[t][0] = x.acc[t][1] = x.acc[t][2] = x.acc[t][3] = 0.0f;
    return x;
}

// Where 8 dimensions of a token lie in half a stage, as the copy engine swizzles them.
__device__ __forceinline__ u32 place(u32 half, int token, int chunk) {
    return half + token * 128 + ((chunk ^ (token & 7)) << 4);
}

// One block in stage `base`, of which the first `limit` tokens count.
__device__ __forceinline__ void attend(Softmax& x, const Spread& q, u32 base, int limit, float scale, int lane) {
    float even[4] = {0.0f, 0.0f, 0.0f, 0.0f}, odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    {
        const int token = lane % 8 + (lane >> 3 & 1) * 8, chunk = lane >> 4;
#pragma unroll
        for (int ks = 0; ks < KS; ++ks) {
            u32 a[4];
            load_matrices(a, place(base + ks / 4 * HALF_BYTES, token, ks % 4 * 2 + chunk));
            multiply_add(ks % 2 ? odd : even, a, q.pair[ks][0], q.pair[ks][1]);
        }
    }
    const int token = lane / 4;
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = token + (i / 2) * 8 < limit ? (even[i] + odd[i]) * scale : -__int_as_float(0x7F800000);
    float best[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int across = 4; across <= 16; across *= 2) best[j] = fmaxf(best[j], __shfl_xor_sync(0xFFFFFFFF, best[j], across));
        best[j] = fmaxf(best[j], x.best[j]);
    }
    if (__any_sync(0xFFFFFFFF, best[0] > x.best[0] || best[1] > x.best[1])) {
        const float shrink[2] = {exp2f(x.best[0] - best[0]), exp2f(x.best[1] - best[1])};
#pragma unroll
        for (int j = 0; j < 2; ++j) x.weight[j] *= shrink[j], x.best[j] = best[j];
#pragma unroll
        for (int t = 0; t < KS; ++t) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x.acc[t][i] *= shrink[i % 2];
        }
    }
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = exp2f(s[i] - x.best[i % 2]);
    x.weight[0] += p[0] + p[2], x.weight[1] += p[1] + p[3];
    const u32 low = transposed(to_pair(p[0], p[1])), high = transposed(to_pair(p[2], p[3]));
    // What stands behind the end weighs nothing, but may be no number.
    const int first = lane % 4 * 2;
    const u32 keep_low = (first < limit ? 0xFFFFu : 0) | (first + 1 < limit ? 0xFFFF0000u : 0);
    const u32 keep_high = (first + 8 < limit ? 0xFFFFu : 0) | (first + 9 < limit ? 0xFFFF0000u : 0);
    const u32 values = base + HALVES * HALF_BYTES;
    const int from = lane % 8 + (lane >> 4) * 8, chunk = lane >> 3 & 1;
#pragma unroll
    for (int t = 0; t < KS; ++t) {
        u32 a[4];
        load_matrices_transposed(a, place(values + t / 4 * HALF_BYTES, from, t % 4 * 2 + chunk));
        a[0] &= keep_low, a[1] &= keep_low, a[2] &= keep_high, a[3] &= keep_high;
        multiply_add(x.acc[t], a, low, high);
    }
}

// The new token is not in the pool yet: whoever ends the sequence writes it there and starts the softmax with it.
__device__ __forceinline__ Softmax start_with_new_token(
    const Arguments& arg, const Spread& q, const u16* source, int head, int request, int position, int lane) {
    const u16* k_from = source + (HQ + head) * D;
    const u16* v_from = k_from + HK * D;
    const float* angles = arg.cos_sin + static_cast<long long>(position) * D;
    const Spread k = rotated(load_spread(k_from, lane), arg.k_norm, angles, arg.eps, lane);
    const long long page = arg.table[static_cast<long long>(request) * arg.table_stride + position / PAGE];
    const long long slot = ((page * PAGE + position % PAGE) * HK + head) * D;
    float score = 0.0f;
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 a = from_pair(q.pair[ks][h]), b = from_pair(k.pair[ks][h]);
            score += a.x * b.x + a.y * b.y;
            if (lane / 4 == ks) {
                const int d = 16 * ks + 8 * h + lane % 4 * 2;
                *reinterpret_cast<u32*>(arg.k_cache + slot + d) = k.pair[ks][h];
                *reinterpret_cast<u32*>(arg.v_cache + slot + d) = *reinterpret_cast<const u32*>(v_from + d);
            }
        }
    }
    score += __shfl_xor_sync(0xFFFFFFFF, score, 1);
    score += __shfl_xor_sync(0xFFFFFFFF, score, 2);
    score *= arg.scale;
    Softmax x;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        x.best[j] = __shfl_sync(0xFFFFFFFF, score, (lane % 4 * 2 + j) * 4);  // a query's quad has its score
        x.weight[j] = lane < 4 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int t = 0; t < KS; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float v = from_pair(v_from[16 * t + 8 * h + lane / 4]).x;
            x.acc[t][2 * h] = x.acc[t][2 * h + 1] = v;
        }
    }
    return x;
}

// Merges the parts of one (row, head) in the order of their programs and writes the output.
__device__ __forceinline__ void combine(
    const Arguments& arg, u16* out, int first_program, int last_program, int first_slot, int num_slots, int lane) {
    constexpr int MINE = D / 32;
    for (int g = 0; g < G; ++g) {
        float best = LOWEST, weight = 0.0f, acc[MINE];
        for (int program = first_program + lane; program <= last_program; program += 32) {
            const int slot = program * 2 + (program == first_program ? first_slot : 0);
            best = fmaxf(best, __ldcg(arg.partial_stats + slot * G + g));
        }
#pragma unroll
        for (int across = 16; across; across /= 2) best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFF, best, across));
#pragma unroll
        for (int i = 0; i < MINE; ++i) acc[i] = 0.0f;
#pragma unroll 8
        for (int program = first_program; program <= last_program; ++program) {
            const int at = (program * 2 + (program == first_program ? first_slot : 0)) * G + g;
            const float factor = exp2f(__ldcg(arg.partial_stats + at) - best);
            weight += factor * __ldcg(arg.partial_stats + num_slots * G + at);
#pragma unroll
            for (int i = 0; i < MINE; i += 2) {
                const float* from = arg.partial_out + static_cast<long long>(at) * D + lane * MINE + i;
                const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
                acc[i] += factor * v.x, acc[i + 1] += factor * v.y;
            }
        }
        const float inverse = weight > 0.0f ? 1.0f / weight : 1.0f;
#pragma unroll
        for (int i = 0; i < MINE; i += 2) {
            *reinterpret_cast<u32*>(out + g * D + lane * MINE + i) = to_pair(acc[i] * inverse, acc[i + 1] * inverse);
        }
    }
}

// A whole sequence's output, or a part of it in slot `slot`; the last part to arrive combines them all. `start` is the flat
// index of the sequence's first block.
__device__ __forceinline__ void finish(
    const Arguments& arg, Softmax& x, int row, int head, bool is_whole, int start, int num_blocks, int slot, int share,
    int lane) {
    u16* out = arg.out + static_cast<long long>(row) * arg.out_stride + head * G * D;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int across = 4; across <= 16; across *= 2) x.weight[j] += __shfl_xor_sync(0xFFFFFFFF, x.weight[j], across);
    }
    if (is_whole) {
        const float inverse[2] = {
            x.weight[0] > 0.0f ? 1.0f / x.weight[0] : 1.0f, x.weight[1] > 0.0f ? 1.0f / x.weight[1] : 1.0f};
#pragma unroll
        for (int t = 0; t < KS; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u32 pair = transposed(to_pair(x.acc[t][2 * h] * inverse[0], x.acc[t][2 * h + 1] * inverse[1]));
                if (lane / 4 < G) *reinterpret_cast<u32*>(out + lane / 4 * D + 16 * t + 8 * h + lane % 4 * 2) = pair;
            }
        }
        return;
    }
    const int num_slots = gridDim.x * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int g = lane % 4 * 2 + j;
        if (g >= G) continue;
        if (lane < 4) {
            arg.partial_stats[slot * G + g] = x.best[j];
            arg.partial_stats[(num_slots + slot) * G + g] = x.weight[j];
        }
#pragma unroll
        for (int t = 0; t < KS; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                arg.partial_out[static_cast<long long>(slot * G + g) * D + 16 * t + 8 * h + lane / 4] = x.acc[t][2 * h + j];
            }
        }
    }
    const int first_program = start / share, last_program = (start + num_blocks - 1) / share;
    __threadfence();
    __syncwarp();
    int before = 0;
    if (lane == 0) before = atomicAdd(arg.arrivals + row * HK + head, 1);
    before = __shfl_sync(0xFFFFFFFF, before, 0);
    if (before == last_program - first_program) {
        __threadfence();
        combine(arg, out, first_program, last_program, start == first_program * share ? 0 : 1, num_slots, lane);
        if (lane == 0) arg.arrivals[row * HK + head] = 0;
    }
}

// Walks the blocks of a share, and sends for them.
struct Sender {
    const Arguments& arg;
    const TensorMap* k_map;
    const TensorMap* v_map;
    int lane, row, head, block, left;
    int seq_len, request, next_len, next_request;
    int window, pages;  // page numbers from `window` on, one a lane

    __device__ __forceinline__ void begin() {
        seq_len = left > 0 ? arg.seq_lens[row] : 0, request = left > 0 ? arg.rows[row] : 0;
        look_ahead();
        turn_to(block * BT / PAGE & ~31);
    }

    __device__ __forceinline__ void look_ahead() {
        const bool there = row + 1 < arg.num_rows;
        next_len = there ? arg.seq_lens[row + 1] : 0, next_request = there ? arg.rows[row + 1] : 0;
    }

    __device__ __forceinline__ void turn_to(int first_page) {
        window = first_page;
        const int mine = first_page + lane;
        pages = mine * PAGE < seq_len ? arg.table[static_cast<long long>(request) * arg.table_stride + mine] : 0;
    }

    __device__ __forceinline__ void send(u32 stage, u32 barrier) {
        if (left == 0) return;
        const int page_index = block * BT / PAGE;
        if (page_index - window >= 32) turn_to(page_index & ~31);
        const int page = __shfl_sync(0xFFFFFFFF, pages, page_index - window);
        if (lane == 0) {
            const int slot = page * PAGE + block * BT % PAGE;
            expect_bytes(barrier, STAGE_BYTES);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int column = head * D + 64 * half;
                load_tile(stage + half * HALF_BYTES, k_map, column, slot, barrier, EVICT_FIRST);
                load_tile(stage + (HALVES + half) * HALF_BYTES, v_map, column, slot, barrier, EVICT_FIRST);
            }
        }
        --left, ++block;
        if (left == 0 || block * BT < seq_len) return;
        block = 0;
        if (++head < HK) {
            if (window != 0) turn_to(0);
            return;
        }
        head = 0;
        do {
            ++row, seq_len = next_len, request = next_request;
            look_ahead();
        } while (seq_len == 0);  // there is one that is not empty, for blocks are left
        turn_to(0);
    }
};

extern "C" __global__ void __launch_bounds__(32) paged_decode(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const __grid_constant__ Arguments arg) {
    extern __shared__ unsigned char memory[];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u;
    const u32 barriers = ring + STAGES * STAGE_BYTES;
    const int lane = threadIdx.x, program = blockIdx.x;
    if (lane == 0) {
        prefetch_map(&k_map);
        prefetch_map(&v_map);
        for (int stage = 0; stage < STAGES; ++stage) init_barrier(barriers + 8 * stage, 1);
        publish_barriers();
    }
    __syncwarp();
    if (!AHEAD) wait_for_inputs();
    const int4 plan = reinterpret_cast<const int4*>(arg.plan)[program];
    const int share = *arg.share;
    int row = plan.x, head = plan.y, block = plan.z, left = plan.w;
    Sender sender{arg, &k_map, &v_map, lane, row, head, block, left};
    sender.begin();
    int seq_len = sender.seq_len, request = sender.request;
    for (int stage = 0; stage < STAGES; ++stage) sender.send(ring + stage * STAGE_BYTES, barriers + 8 * stage);
    if (AHEAD) wait_for_inputs();
    release_dependents();

    int flat = program * share, slot = program * 2, stage = 0, parity = 0;
    while (left > 0) {
        const int num_blocks = (seq_len + BT - 1) / BT, last = min(num_blocks, block + left);
        const u16* source = arg.q + static_cast<long long>(row) * arg.q_stride;
        const int query = lane / 4 < G ? lane / 4 : G - 1;  // the others compute for nobody
        Spread q = load_spread(source + (head * G + query) * D, lane);
        const int limit = ROPE ? seq_len - 1 : seq_len;
        Softmax x;
        if (ROPE) q = rotated(q, arg.q_norm, arg.cos_sin + static_cast<long long>(limit) * D, arg.eps, lane);
        if (ROPE && last == num_blocks) {
            x = start_with_new_token(arg, q, source, head, request, limit, lane);
        } else {
            x = nothing();
        }
        for (int at = block; at < last; ++at) {
            wait_barrier(barriers + 8 * stage, parity);
            attend(x, q, ring + stage * STAGE_BYTES, limit - at * BT, arg.scale, lane);
            __syncwarp();
            sender.send(ring + stage * STAGE_BYTES, barriers + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        finish(arg, x, row, head, block == 0 && last == num_blocks, flat - block, num_blocks, slot, share, lane);
        left -= last - block, flat += last - block;
        block = 0, slot = program * 2 + 1;
        if (left > 0 && ++head == HK) {
            head = 0;
            do {
                ++row;
                seq_len = arg.seq_lens[row], request = arg.rows[row];
            } while (seq_len == 0);
        }
    }
}
