// One head's vector in the registers of a warp, as the tensor cores take it, normalised and rotated.
//
// Given when compiled: D, its size; NORM.

constexpr int KS = D / 16;

// One head's vector, spread so that a quad of lanes has it all: pair[ks][h] are dimensions 16 ks + 8 h + 2 (lane % 4) and the
// next.
struct Spread {
    u32 pair[KS][2];
};

__device__ __forceinline__ Spread load_spread(const u16* from, int lane) {
    Spread x;
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) x.pair[ks][h] = *reinterpret_cast<const u32*>(from + 16 * ks + 8 * h + lane % 4 * 2);
    }
    return x;
}

// Cosines and sines of one position, of a lane's dimensions in the first half of the vector.
struct Angles {
    float2 cos[KS / 2][2], sin[KS / 2][2];
};

__device__ __forceinline__ Angles load_angles(const float* from, int lane) {
    Angles angles;
#pragma unroll
    for (int ks = 0; ks < KS / 2; ++ks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int d = 16 * ks + 8 * h + lane % 4 * 2;
            angles.cos[ks][h] = *reinterpret_cast<const float2*>(from + d);
            angles.sin[ks][h] = *reinterpret_cast<const float2*>(from + D / 2 + d);
        }
    }
    return angles;
}

// RMS-normed where asked, rotated, rounded.
__device__ __forceinline__ Spread rotated(const Spread& x, const u16* norm, const Angles& angles, float eps, int lane) {
    float2 y[KS][2];
    float length = 0.0f;
#pragma unroll
    for (int ks = 0; ks < KS; ++ks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            y[ks][h] = from_pair(x.pair[ks][h]);
            length += y[ks][h].x * y[ks][h].x + y[ks][h].y * y[ks][h].y;
        }
    }
    if (NORM) {
        length += __shfl_xor_sync(0xFFFFFFFF, length, 1);
        length += __shfl_xor_sync(0xFFFFFFFF, length, 2);
        const float factor = rsqrtf(length / D + eps);
#pragma unroll
        for (int ks = 0; ks < KS; ++ks) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 w = from_pair(*reinterpret_cast<const u32*>(norm + 16 * ks + 8 * h + lane % 4 * 2));
                const float2 rounded = from_pair(to_pair(y[ks][h].x * factor, y[ks][h].y * factor));
                y[ks][h] = make_float2(rounded.x * w.x, rounded.y * w.y);
            }
        }
    }
    Spread result;
#pragma unroll
    for (int ks = 0; ks < KS / 2; ++ks) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float2 c = angles.cos[ks][h], s = angles.sin[ks][h];
            const float2 a = y[ks][h], b = y[ks + KS / 2][h];
            result.pair[ks][h] = to_pair(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
            result.pair[ks + KS / 2][h] = to_pair(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
        }
    }
    return result;
}
