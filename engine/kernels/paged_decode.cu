// Attention of one query token a row over its pages, on Hopper, for many sequences.
//
// A warp is a CTA and walks a share of the step's KV blocks (decode_plan.py). The bulk copy
// engine fills its ring of stages, across the borders of sequences: the next one's first blocks are on their way while this one
// is computed, so nothing is drained between them. Behind hopper.cuh, head_vector.cuh and attend_block.cuh.
//
// Given when compiled: G (queries of a KV head, up to 8), HK, D (64 or 128), PAGE (a multiple of 16), STAGES, ROPE, NORM,
// AHEAD, BFLOAT16.

constexpr int HQ = HK * G;
constexpr int STAGE_BYTES = 2 * BLOCK_BYTES;

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

// What a sequence needs besides its blocks. It is sent for while the sequence before is computed.
struct Inputs {
    Spread q, k;
    Angles angles;
    u16 v[2 * KS];   // of a lane's dimensions of the result
    u32 v_pair[2];   // what this lane writes to the pool
    long long slot;  // of the new token

    // What no kernel writes that may still run ahead of the wait.
    __device__ __forceinline__ void take_place(const Arguments& arg, int head, int seq_len, int request) {
        if (!ROPE) return;
        const int position = seq_len - 1;
        angles = load_angles(arg.cos_sin + static_cast<long long>(position) * D, threadIdx.x);
        const long long page = arg.table[static_cast<long long>(request) * arg.table_stride + position / PAGE];
        slot = ((page * PAGE + position % PAGE) * HK + head) * D;
    }

    __device__ __forceinline__ void take_vectors(const Arguments& arg, int row, int head) {
        const int lane = threadIdx.x;
        const u16* source = arg.q + static_cast<long long>(row) * arg.q_stride;
        const int query = lane / 4 < G ? lane / 4 : G - 1;  // the others compute for nobody
        q = load_spread(source + (head * G + query) * D, lane);
        if (!ROPE) return;
        const u16* k_from = source + (HQ + head) * D;
        const u16* v_from = k_from + HK * D;
        k = load_spread(k_from, lane);
#pragma unroll
        for (int i = 0; i < 2 * KS; ++i) v[i] = v_from[8 * i + lane / 4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (lane / 4 < KS) v_pair[h] = *reinterpret_cast<const u32*>(v_from + lane / 4 * 16 + 8 * h + lane % 4 * 2);
        }
    }
};

// The new token is not in the pool yet: whoever ends the sequence writes it there and starts the softmax with it.
__device__ __forceinline__ Softmax start_with_new_token(const Arguments& arg, const Spread& q, const Inputs& in, int lane) {
    const Spread k = rotated(in.k, arg.k_norm, in.angles, arg.eps, lane);
    float score = 0.0f;
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 a = from_pair(q.pair[ks][h]), b = from_pair(k.pair[ks][h]);
            score += a.x * b.x + a.y * b.y;
            if (lane / 4 == ks) {
                const long long at = in.slot + 16 * ks + 8 * h + lane % 4 * 2;
                *reinterpret_cast<u32*>(arg.k_cache + at) = k.pair[ks][h];
                *reinterpret_cast<u32*>(arg.v_cache + at) = in.v_pair[h];
            }
        }
    }
    score += __shfl_xor_sync(0xFFFFFFFF, score, 1);
    score += __shfl_xor_sync(0xFFFFFFFF, score, 2);
    score *= arg.scale;
    Softmax x;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        x.origin[j] = __shfl_sync(0xFFFFFFFF, score, (lane % 4 * 2 + j) * 4);  // a query's quad has its score
        x.weight[j] = lane < 4 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 2 * KS; ++i) x.acc[i / 2][i % 2 * 2] = x.acc[i / 2][i % 2 * 2 + 1] = from_pair(in.v[i]).x;
    return x;
}

// Merges the parts of one (row, head) in the order of their programs and writes the output. Every round trip to memory is a
// microsecond, so some parts of all queries are sent for at once.
__device__ __forceinline__ void combine(
    const Arguments& arg, u16* out, int first_program, int last_program, int first_slot, int lane) {
    const int num_slots = gridDim.x * 2;
    constexpr int MINE = D / 32, AT_ONCE = G <= 2 ? 4 : G <= 4 ? 2 : 1;
    float best[G], weight[G], acc[G][MINE];
#pragma unroll
    for (int g = 0; g < G; ++g) {
        best[g] = LOWEST, weight[g] = 0.0f;
#pragma unroll
        for (int i = 0; i < MINE; ++i) acc[g][i] = 0.0f;
    }
    for (int program = first_program; program <= last_program; program += AT_ONCE) {
        float part_best[AT_ONCE][G], part_weight[AT_ONCE][G];
        float2 part[AT_ONCE][G][MINE / 2];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int there = min(program + n, last_program);
            const int slot = there * 2 + (there == first_program ? first_slot : 0);
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const int at = slot * G + g;
                part_best[n][g] = __ldcg(arg.partial_stats + at);
                part_weight[n][g] = __ldcg(arg.partial_stats + num_slots * G + at);
                const float2* from = reinterpret_cast<const float2*>(arg.partial_out + static_cast<long long>(at) * D);
#pragma unroll
                for (int i = 0; i < MINE / 2; ++i) part[n][g][i] = __ldcg(from + lane * (MINE / 2) + i);
            }
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            if (program + n > last_program) break;
#pragma unroll
            for (int g = 0; g < G; ++g) {
                const float larger = fmaxf(best[g], part_best[n][g]);
                const float old = exp2f(best[g] - larger), more = exp2f(part_best[n][g] - larger);
                best[g] = larger, weight[g] = weight[g] * old + part_weight[n][g] * more;
#pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    acc[g][i] = acc[g][i] * old + (i % 2 ? part[n][g][i / 2].y : part[n][g][i / 2].x) * more;
                }
            }
        }
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const float inverse = weight[g] > 0.0f ? 1.0f / weight[g] : 1.0f;
#pragma unroll
        for (int i = 0; i < MINE; i += 2) {
            *reinterpret_cast<u32*>(out + g * D + lane * MINE + i) = to_pair(acc[g][i] * inverse, acc[g][i + 1] * inverse);
        }
    }
}

// A part of a sequence that has been written, and who came before.
struct Part {
    int row, head, first_program, last_program, first_slot;
    int before;  // lane 0's
    bool is_open;
};

// The last part to arrive combines them all.
__device__ __forceinline__ void settle(const Arguments& arg, Part& part, int lane) {
    if (!part.is_open) return;
    part.is_open = false;
    if (__shfl_sync(0xFFFFFFFF, part.before, 0) != part.last_program - part.first_program) return;
    __syncwarp();
    u16* out = arg.out + static_cast<long long>(part.row) * arg.out_stride + part.head * G * D;
    combine(arg, out, part.first_program, part.last_program, part.first_slot, lane);
    if (lane == 0) arg.arrivals[part.row * HK + part.head] = 0;
}

__device__ __forceinline__ void add_up_weights(Softmax& x) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int across = 4; across <= 16; across *= 2) x.weight[j] += __shfl_xor_sync(0xFFFFFFFF, x.weight[j], across);
    }
}

// A whole sequence's output.
__device__ __forceinline__ void write_out(const Arguments& arg, const Softmax& x, int row, int head, int lane) {
    u16* out = arg.out + static_cast<long long>(row) * arg.out_stride + head * G * D;
    const float inverse[2] = {x.weight[0] > 0.0f ? 1.0f / x.weight[0] : 1.0f, x.weight[1] > 0.0f ? 1.0f / x.weight[1] : 1.0f};
#pragma unroll
    for (int t = 0; t < KS; ++t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 pair = transposed(to_pair(x.acc[t][2 * h] * inverse[0], x.acc[t][2 * h + 1] * inverse[1]));
            if (lane / 4 < G) *reinterpret_cast<u32*>(out + lane / 4 * D + 16 * t + 8 * h + lane % 4 * 2) = pair;
        }
    }
}

// A part of a sequence, into slot `slot`.
__device__ __forceinline__ void write_part(const Arguments& arg, const Softmax& x, Part& part, int slot, int lane) {
    const int num_slots = gridDim.x * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int g = lane % 4 * 2 + j;
        if (g >= G) continue;
        if (lane < 4) {
            arg.partial_stats[slot * G + g] = x.origin[j];
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
    __syncwarp();
    if (lane == 0) part.before = arrive_at(arg.arrivals + part.row * HK + part.head);
    part.is_open = true;
}

// Goes from sequence to sequence, and knows of the rows ahead what takes time to learn.
struct Walk {
    const Arguments& arg;
    int row, head;
    int seq_len, request, pages;  // pages: the first of its row, one a lane
    int next_len, next_request, next_pages, after_len, after_request;

    __device__ __forceinline__ void begin() {
        seq_len = arg.seq_lens[row], request = arg.rows[row];
        look(row + 1, next_len, next_request);
        look(row + 2, after_len, after_request);
        pages = pages_from(0, seq_len, request);
        next_pages = pages_from(0, next_len, next_request);
    }

    __device__ __forceinline__ void look(int at, int& len, int& whose) const {
        len = at < arg.num_rows ? arg.seq_lens[at] : 0, whose = at < arg.num_rows ? arg.rows[at] : 0;
    }

    __device__ __forceinline__ int pages_from(int first, int len, int whose) const {
        const int mine = first + threadIdx.x;
        return mine * PAGE < len ? arg.table[static_cast<long long>(whose) * arg.table_stride + mine] : 0;
    }

    // There must be one: a row without tokens is none.
    __device__ __forceinline__ void go_on() {
        if (++head < HK) return;
        head = 0;
        do {
            ++row, seq_len = next_len, request = next_request, pages = next_pages;
            next_len = after_len, next_request = after_request;
            look(row + 2, after_len, after_request);
            next_pages = pages_from(0, next_len, next_request);
        } while (seq_len == 0);
    }
};

// Sends for the blocks of a share, one after the other.
struct Sender {
    const TensorMap* k_map;
    const TensorMap* v_map;
    Walk walk;
    int block, left;
    int window, pages;  // page numbers from `window` on, one a lane

    __device__ __forceinline__ void begin() { turn_to(block * BT / PAGE & ~31); }

    __device__ __forceinline__ void turn_to(int first) {
        window = first;
        pages = first == 0 ? walk.pages : walk.pages_from(first, walk.seq_len, walk.request);
    }

    __device__ __forceinline__ void send(u32 stage, u32 barrier) {
        if (left == 0) return;
        const int page_index = block * BT / PAGE;
        if (page_index - window >= 32) turn_to(page_index & ~31);
        const int page = __shfl_sync(0xFFFFFFFF, pages, page_index - window);
        if (threadIdx.x == 0) {
            const int slot = page * PAGE + block * BT % PAGE;
            expect_bytes(barrier, STAGE_BYTES);
            load_box(stage, k_map, 0, walk.head * HALVES, slot, barrier, EVICT_FIRST);
            load_box(stage + BLOCK_BYTES, v_map, 0, walk.head * HALVES, slot, barrier, EVICT_FIRST);
        }
        --left, ++block;
        if (left == 0 || block * BT < walk.seq_len) return;
        block = 0;
        walk.go_on();
        turn_to(0);
    }
};

__device__ __forceinline__ void prepare(const TensorMap* k_map, const TensorMap* v_map, u32 barriers) {
    if (threadIdx.x == 0) {
        prefetch_map(k_map);
        prefetch_map(v_map);
        for (int stage = 0; stage < STAGES; ++stage) init_barrier(barriers + 8 * stage, 1);
        publish_barriers();
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32) paged_decode(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map, const __grid_constant__ Arguments arg) {
    extern __shared__ unsigned char memory[];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u;
    const u32 barriers = ring + STAGES * STAGE_BYTES;
    const int lane = threadIdx.x, program = blockIdx.x;
    prepare(&k_map, &v_map, barriers);
    if (!AHEAD) wait_for_inputs();
    const int4 plan = reinterpret_cast<const int4*>(arg.plan)[program];
    const int share = *arg.share;
    int block = plan.z, left = plan.w;
    if (left == 0) {
        if (AHEAD) wait_for_inputs();  // who comes after this kernel relies on all before it
        return;
    }
    Walk walk{arg, plan.x, plan.y};
    walk.begin();
    Sender sender{&k_map, &v_map, walk, block, left};
    sender.begin();
    for (int stage = 0; stage < STAGES; ++stage) sender.send(ring + stage * STAGE_BYTES, barriers + 8 * stage);
    Inputs in;
    in.take_place(arg, walk.head, walk.seq_len, walk.request);
    if (AHEAD) wait_for_inputs();
    release_dependents();
    in.take_vectors(arg, walk.row, walk.head);

    int flat = program * share, slot = program * 2, stage = 0, parity = 0;
    Part part;
    part.is_open = false;
    while (true) {
        const int row = walk.row, head = walk.head, limit = ROPE ? walk.seq_len - 1 : walk.seq_len;
        const int num_blocks = (walk.seq_len + BT - 1) / BT, last = min(num_blocks, block + left);
        const Spread q = ROPE ? rotated(in.q, arg.q_norm, in.angles, arg.eps, lane) : in.q;
        Softmax x = ROPE && last == num_blocks ? start_with_new_token(arg, q, in, lane) : nothing();
        left -= last - block;
        if (left > 0) {
            walk.go_on();
            in.take_place(arg, walk.head, walk.seq_len, walk.request);
            in.take_vectors(arg, walk.row, walk.head);
        }
        for (int at = block; at < last; ++at) {
            wait_barrier(barriers + 8 * stage, parity);
            if ((at + 1) * BT <= limit) {
                attend<false>(x, q, ring + stage * STAGE_BYTES, BT, arg.scale, lane);
            } else {
                attend<true>(x, q, ring + stage * STAGE_BYTES, limit - at * BT, arg.scale, lane);
            }
            __syncwarp();
            sender.send(ring + stage * STAGE_BYTES, barriers + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        settle(arg, part, lane);
        add_up_weights(x);
        if (block == 0 && last == num_blocks) {
            write_out(arg, x, row, head, lane);
        } else {
            const int start = flat - block, first = start / share;
            part = {row, head, first, (start + num_blocks - 1) / share, start == first * share ? 0 : 1};
            write_part(arg, x, part, slot, lane);
        }
        if (left == 0) break;
        flat += last - block;
        block = 0, slot = program * 2 + 1;
    }
    settle(arg, part, lane);
}
