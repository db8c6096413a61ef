// A block of a sequence's keys and values against the queries of one KV head, by the tensor cores. Scores are keys times
// queries and results are values times weights, with tokens and dimensions as the tall side, because a KV head has few queries.
//
// Behind head_vector.cuh. Given when compiled: D, the size of a head.

constexpr int BT = 16;  // tokens of a block
constexpr int HALVES = D / 64;
constexpr int BLOCK_BYTES = BT * D * 2;
constexpr float LOWEST = -1e30f;

// Running softmax of a lane: for queries 2 (lane % 4) + j, the score that weights are relative to and this lane's part of the
// weight; and acc[t][2 h + j], dimension 16 t + 8 h + lane / 4.
struct Softmax {
    float origin[2], weight[2];
    float acc[KS][4];
};

__device__ __forceinline__ Softmax nothing() {
    Softmax x;
    x.origin[0] = x.origin[1] = LOWEST;
    x.weight[0] = x.weight[1] = 0.0f;
#pragma unroll
    for (int t = 0; t < KS; ++t) x.acc[t][0] = x.acc[t][1] = x.acc[t][2] = x.acc[t][3] = 0.0f;
    return x;
}

// Where 8 dimensions of a token lie: a block has 128 bytes of it behind one another, and the copy engine swizzles those.
__device__ __forceinline__ u32 place(u32 block, int token, int dimension) {
    const int line = token * HALVES + dimension / 64;
    return block + line * 128 + ((dimension % 64 / 8 ^ (line & 7)) << 4);
}

// Scores of a block: s[2 h + j], token 8 h + lane / 4.
__device__ __forceinline__ void multiply_keys(float (&s)[4], const Spread& q, u32 keys, int lane) {
    const int token = lane % 8 + (lane >> 3 & 1) * 8, chunk = lane >> 4 << 3;
    float sums[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
        u32 a[4];
        load_matrices(a, place(keys, token, 16 * ks + chunk));
        multiply_add(sums[ks % 4], a, q.pair[ks][0], q.pair[ks][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

// A new origin, where a score is so far above the old one that its weight would be large. That is seldom, once a few are known.
__device__ __forceinline__ void move_origin(Softmax& x, const float (&s)[4]) {
    bool is_far = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) is_far |= s[i] > x.origin[i % 2] + 8.0f;
    if (!__any_sync(0xFFFFFFFF, is_far)) return;
    float best[2] = {fmaxf(s[0], s[2]), fmaxf(s[1], s[3])}, shrink[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int across = 4; across <= 16; across *= 2) best[j] = fmaxf(best[j], __shfl_xor_sync(0xFFFFFFFF, best[j], across));
        best[j] = fmaxf(best[j], x.origin[j]);
        shrink[j] = exp2f(x.origin[j] - best[j]);
        x.weight[j] *= shrink[j], x.origin[j] = best[j];
    }
#pragma unroll
    for (int t = 0; t < KS; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x.acc[t][i] *= shrink[i % 2];
    }
}

// One block in stage `base`. If it is the last, its first `limit` tokens count.
template <bool IS_LAST>
__device__ __forceinline__ void attend(Softmax& x, const Spread& q, u32 base, int limit, float scale, int lane) {
    float s[4];
    multiply_keys(s, q, base, lane);
    u32 values[KS][4];  // sent for before the scores are looked at
    const int from = lane % 8 + (lane >> 4) * 8, chunk = (lane >> 3 & 1) << 3;
#pragma unroll
    for (int t = 0; t < KS; ++t) load_matrices_transposed(values[t], place(base + BLOCK_BYTES, from, 16 * t + chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[i] *= scale;
        if (IS_LAST && lane / 4 + i / 2 * 8 >= limit) s[i] = -__int_as_float(0x7F800000);
    }
    move_origin(x, s);
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = exp2f(s[i] - x.origin[i % 2]);
    x.weight[0] += p[0] + p[2], x.weight[1] += p[1] + p[3];
    const u32 low = transposed(to_pair(p[0], p[1])), high = transposed(to_pair(p[2], p[3]));
    if (IS_LAST) {  // what stands behind the end weighs nothing, but may be no number
        const int first = lane % 4 * 2;
        const u32 keep_low = (first < limit ? 0xFFFFu : 0) | (first + 1 < limit ? 0xFFFF0000u : 0);
        const u32 keep_high = (first + 8 < limit ? 0xFFFFu : 0) | (first + 9 < limit ? 0xFFFF0000u : 0);
#pragma unroll
        for (int t = 0; t < KS; ++t) {
            values[t][0] &= keep_low, values[t][1] &= keep_low, values[t][2] &= keep_high, values[t][3] &= keep_high;
        }
    }
#pragma unroll
    for (int t = 0; t < KS; ++t) multiply_add(x.acc[t], values[t], low, high);
}
