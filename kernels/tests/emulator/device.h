// What kernels/cuda/entropy.cu needs of a device, for the host: the CPU takes the place of a GPU where there is none.
// Included by the kernels' own text; see threads.h for how their threads run.
#pragma once

#include <cmath>
#include <cstring>

#include "threads.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define SHARED(type, name) type &name = *static_cast<type *>(emulator::shared_memory(sizeof(type)))

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())

struct alignas(16) Vector {
    u32 word[4];
};

static inline float __uint_as_float(u32 bits) {
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

static inline u32 bits_of(float value) {
    u32 out;
    std::memcpy(&out, &value, sizeof out);
    return out;
}

// Compiled with -ffp-contract=off, so these round once, as on the device.
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fsub_rn(float a, float b) { return a - b; }

// Rounded down. The product of two in double precision is exact, or too large or small for it to matter.
static inline float __fmul_rd(float a, float b) {
    double exact = (double)a * (double)b;
    float out = (float)exact;
    return out > exact ? std::nextafter(out, -__builtin_inff()) : out;
}

static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// As the device's own, results below the smallest normal number are 0. Its error is a little larger than exp2f's.
static inline float exp2_of(float y) {
    float out = exp2f(y);
    return out < 1.17549435e-38f ? 0.0f : out;
}

static inline float max_or_nan(float a, float b) { return a != a || b != b ? __builtin_nanf("") : (a > b ? a : b); }

static inline float from_half(u16 bits) {
    u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31  ? (fraction ? __builtin_nanf("") : __builtin_inff())
                 : exponent == 0 ? std::ldexp((float)fraction, -24)
                                 : std::ldexp((float)(1024 + fraction), (int)exponent - 25);
    return bits >> 15 ? -size : size;
}

// max.bf16x2 and max.f16x2: the other one where one is NaN, a NaN where both are.
template <class Widened> static inline u16 larger_half(u16 a, u16 b, Widened widened) {
    float x = widened(a), y = widened(b);
    if (x != x) {
        return y != y ? 0x7fff : b;
    }
    return y != y || x > y || (x == y && !(a >> 15)) ? a : b;
}

template <class Widened> static inline u32 larger_halves(u32 a, u32 b, Widened widened) {
    return larger_half((u16)a, (u16)b, widened) | (u32)larger_half((u16)(a >> 16), (u16)(b >> 16), widened) << 16;
}

static inline u32 max_bf16x2(u32 a, u32 b) {
    return larger_halves(a, b, [](u16 bits) { return __uint_as_float((u32)bits << 16); });
}

static inline u32 max_f16x2(u32 a, u32 b) { return larger_halves(a, b, from_half); }

// An address that is no multiple of 16 is an error on the device.
template <class T> static inline T load_aligned(const T *from) {
    emulator::check((u64)from % 16 == 0, "a load of 16 bytes from an address that is no multiple of 16");
    T out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

static inline Vector load_vector(const Vector *from) { return load_aligned(from); }

template <class Partial> static inline Partial load_partial(const Partial *from) { return load_aligned(from); }

static inline void __syncthreads() { emulator::wait_for_block(); }

// What follows is seen by others at some time only: they may run in between.
static inline void __threadfence() { emulator::yield(); }

static inline u32 atomicAdd(u32 *at, u32 value) {
    emulator::yield();
    u32 old = *at;
    *at = old + value;
    return old;
}

static inline u32 atomicMin(u32 *at, u32 value) {
    emulator::yield();
    u32 old = *at;
    *at = value < old ? value : old;
    return old;
}

static inline u32 shuffled(u32 value, u32 lanes) { return emulator::exchange(value, lanes); }

static inline float __shfl_xor_sync(u32 mask, float value, u32 lanes) {
    emulator::check(mask == 0xffffffffu, "a shuffle of a part of a warp");
    return __uint_as_float(shuffled(bits_of(value), lanes));
}
