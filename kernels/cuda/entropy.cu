// Entropy, maximum, log-sum-exp, the probability of one token and the likeliest token of rows of logits, read once.
//
// With m = max x, c = log2(e) / T and y = (x - m) c, a row needs s = sum 2^y and u = sum y 2^y: then
//
//     logsumexp(x / T) = m / T + ln s        H = -sum p ln p = ln s - ln 2 * u / s        p = softmax(x / T), nats
//
// Both sums move over to a larger maximum when one is met (the online softmax of Milakov and Gimelshein, arXiv
// 1805.02867, algorithm 3), so m need not be known before. ln s and -u / s are at least 0: nothing cancels. A row that is
// almost sure has s = 1 + r with a small r, of which s, as it is rounded, has lost the most: single precision logits, whose
// entropy is to be right to 1e-5 of itself, have r summed up too, and u without the maximum.
//
// A row is read by `splits` blocks, in vectors of 16 bytes from the first address that is a multiple of 16; what is before
// and after that goes one logit a thread. The block that is last at a row puts the parts together, and does the state of
// EAT for the row of a probe. One launch, no other memory than the logits, a few bytes a block, and the answers.
//
// The same text is compiled by nvcc, by NVRTC without any header, and for the host, where tests/emulator runs it thread by
// thread. What those do not share are the few functions under "The device". It is one long file because NVRTC is given one
// text, and no folder to look for others in.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

static constexpr u32 THREADS = 256;
static constexpr u32 WARP = 32;
static constexpr u32 WARPS = THREADS / WARP;
// Vectors of 16 bytes that a thread asks for before it uses the first: what hides the latency of memory.
#ifndef MERIDIAN_UNROLL
#define MERIDIAN_UNROLL 4
#endif
static constexpr u32 UNROLL = MERIDIAN_UNROLL;
// Blocks of a multiprocessor at the same time, which bounds the registers of a thread. Both may be set by a compiler's
// option, to look for better ones: checks/gpu.
#ifndef MERIDIAN_BLOCKS
#define MERIDIAN_BLOCKS 5
#endif

// The least y that is told apart: 2^-160 is 0 in single precision, and -160 * 0 is a number.
static constexpr float LOWEST = -160.0f;
// Where |m c| is below this, sums are against m c rounded down, which an fma takes for every y: how far that is off, at most
// 0.06, is in the maximum's own y too, and so in no result. Beyond, sums are against m c itself.
static constexpr float PLAIN = 1048576.0f;
// As far as anything is ever moved; times any sum it is finite, and 2 to it is 0.
static constexpr float FAR = -1e30f;

static constexpr float LOG2_E = 1.44269504088896341f;
static constexpr float LN_2 = 0.693147180559945309f;
// Without a header, and for every compiler.
#define FLOAT_MAX __uint_as_float(0x7f7fffffu)
#define INF __uint_as_float(0x7f800000u)
#define NO_NUMBER __uint_as_float(0x7fc00000u)
static constexpr u32 NOWHERE = 0xffffffffu;

// The state of EAT for one request; meridian_kernels::EatState.
struct EatState {
    float mean;
    float variance;
    u32 probes;
};

// The answer of one row; meridian_kernels::RowStats. Written as two vectors.
struct alignas(16) RowStats {
    float entropy;
    float max;
    float logsumexp;
    float probability;
    int top;
    EatState eat;
};

// What is known of a part of a row.
struct Sums {
    float max;
    // NaN once the row cannot be a distribution.
    float sum;
    // Of y 2^y; where r is summed up, of what is in r.
    float weighted;
    // r: of `sum`, all but what is equal to the maximum, or as good as that.
    float rest;
};

// What one block knows.
struct alignas(16) Partial {
    Sums sums;
    // The first logit of the maximum.
    u32 top;
};

// kernels/src/cuda/params.rs has the same.
struct Params {
    const void *logits;
    u64 row_stride;        // logits
    const u32 *rows;       // of each answer, its row; null: the row of the same number
    const int *tokens;     // of each answer; null: none
    const float *temperatures; // of each answer; null: 1
    const int *slots;      // of each answer, its place in `states`, or -1; null: no probes
    EatState *states;
    Partial *partials;     // `splits` an answer; null when `splits` is 1
    u32 *tickets;          // one an answer, all 0 before and after; null when `splits` is 1
    RowStats *answers;
    float alpha;
    u32 vocab;
    u32 splits;
};

// ---- The device ----------------------------------------------------------------------------------------------------

#ifdef MERIDIAN_EMULATOR
#include "device.h"
#else

#define SHARED(type, name) __shared__ type name

struct alignas(16) Vector {
    u32 word[4];
};

// 2^y, relative error 2^-22; results below the smallest normal number are 0.
static __device__ __forceinline__ float exp2_of(float y) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(y));
    return out;
}

// NaN when either is; fmaxf is the other one.
static __device__ __forceinline__ float max_or_nan(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

static __device__ __forceinline__ float from_half(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}

// The larger of each half, the other one where one is NaN.
static __device__ __forceinline__ u32 max_bf16x2(u32 a, u32 b) {
    u32 out;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

static __device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
    u32 out;
    asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}

// 16 bytes that nobody writes to during the launch and that this block reads once.
static __device__ __forceinline__ Vector load_vector(const Vector *from) {
    Vector out;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.word[0]), "=r"(out.word[1]), "=r"(out.word[2]), "=r"(out.word[3])
                 : "l"(from));
    return out;
}

// What another block wrote, from the cache that all blocks share.
static __device__ __forceinline__ Partial load_partial(const Partial *from) {
    Partial out;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.sums.max), "=f"(out.sums.sum), "=f"(out.sums.weighted), "=f"(out.sums.rest)
                 : "l"(from)
                 : "memory");
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(out.top) : "l"(&from->top) : "memory");
    return out;
}

#endif

// ---- Kinds of logits -----------------------------------------------------------------------------------------------

struct F32 {
    typedef float Raw;
    // Whether r is summed up. That is two operations more a logit: half as many logits a byte leave room for it.
    static constexpr bool HAS_REST = true;
    // -inf in every part of a word.
    static constexpr u32 MASKED = 0xff800000u;
    static constexpr u32 PER_VECTOR = 4;

    static __device__ __forceinline__ float widened(float raw) { return raw; }

    static __device__ __forceinline__ float get(const Vector &vector, u32 i) { return __uint_as_float(vector.word[i]); }

    // The largest of all that are numbers; NaN, or -inf, when none is.
    template <u32 N> static __device__ __forceinline__ float largest(const Vector (&vectors)[N]) {
        float top = get(vectors[0], 0);
#pragma unroll
        for (u32 i = 1; i < N * PER_VECTOR; i++) {
            top = fmaxf(top, get(vectors[i / PER_VECTOR], i % PER_VECTOR));
        }
        return top;
    }
};

// Two logits a word: the even one below.
template <class Half> struct Halves {
    typedef u16 Raw;
    static constexpr bool HAS_REST = false;
    static constexpr u32 PER_VECTOR = 8;

    static __device__ __forceinline__ float get(const Vector &vector, u32 i) {
        u32 word = vector.word[i / 2];
        return i % 2 ? Half::high(word) : Half::low(word);
    }

    template <u32 N> static __device__ __forceinline__ float largest(const Vector (&vectors)[N]) {
        u32 top = vectors[0].word[0];
#pragma unroll
        for (u32 i = 1; i < N * 4; i++) {
            top = Half::larger(top, vectors[i / 4].word[i % 4]);
        }
        return fmaxf(Half::low(top), Half::high(top));
    }
};

struct Bf16 : Halves<Bf16> {
    static constexpr u32 MASKED = 0xff80ff80u;

    static __device__ __forceinline__ float widened(u16 raw) { return __uint_as_float((u32)raw << 16); }
    static __device__ __forceinline__ float low(u32 word) { return __uint_as_float(word << 16); }
    static __device__ __forceinline__ float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
    static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return max_bf16x2(a, b); }
};

struct F16 : Halves<F16> {
    static constexpr u32 MASKED = 0xfc00fc00u;

    static __device__ __forceinline__ float widened(u16 raw) { return from_half(raw); }
    static __device__ __forceinline__ float low(u32 word) { return from_half((u16)word); }
    static __device__ __forceinline__ float high(u32 word) { return from_half((u16)(word >> 16)); }
    static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return max_f16x2(a, b); }
};

// ---- One thread ----------------------------------------------------------------------------------------------------

// What one thread has read.
struct Running {
    Sums sums = {-INF, 0.0f, 0.0f, 0.0f};
    // Where the first of what was read together with the maximum is.
    u32 where = NOWHERE;
};

static __device__ __forceinline__ bool is_plain(float exponent) { return fabsf(exponent) < PLAIN; }

// y of a logit that is no more than `max`; at least 0 for the maximum.
static __device__ __forceinline__ float exponent_of(float x, float max, float c) {
    float exponent = __fmul_rd(max, c);
    return fmaxf(is_plain(exponent) ? fmaf(x, c, -exponent) : __fmul_rn(__fsub_rn(x, max), c), LOWEST);
}

// The maximum's own y, which its product's rounding leaves.
static __device__ __forceinline__ float own_exponent(float max, float c) {
    float exponent = __fmul_rd(max, c);
    return is_plain(exponent) ? fmaf(max, c, -exponent) : 0.0f;
}

// How far a sum against the maximum `from` moves when it is put against one whose product, `exponent`, is plain.
static __device__ __forceinline__ float distance_to_plain(float from, float exponent, float c) {
    float old = __fmul_rd(from, c);
    return fmaxf(is_plain(old) ? __fsub_rn(old, exponent) : fmaf(from, c, -exponent), FAR);
}

// How far a sum against the maximum `from` moves when it is put against `to`, which is no less.
static __device__ __forceinline__ float distance(float from, float to, float c) {
    if (from == to) {
        return 0.0f;
    }
    float old = __fmul_rd(from, c), exponent = __fmul_rd(to, c);
    if (is_plain(exponent)) {
        return distance_to_plain(from, exponent, c);
    }
    return fmaxf(is_plain(old) ? -fmaf(to, c, -old) : __fmul_rn(__fsub_rn(from, to), c), FAR);
}

// Put sums against another maximum, no less than theirs and `by` from it: then all of them is rest.
template <class Kind> static __device__ __forceinline__ void move(Sums &of, float by, float c) {
    float factor = exp2_of(by);
    if (!Kind::HAS_REST) {
        of.weighted = factor * fmaf(by, of.sum, of.weighted);
        of.sum *= factor;
    } else if (by < 0.0f) {
        float all = fmaf(own_exponent(of.max, c), of.sum - of.rest, of.weighted);
        of.weighted = factor * fmaf(by, of.sum, all);
        of.sum *= factor;
        of.rest = of.sum;
    }
}

// Two parts of a row.
template <class Kind> static __device__ __forceinline__ void merge(Sums &into, Sums from, float c) {
    float max = fmaxf(into.max, from.max);
    move<Kind>(into, distance(into.max, max, c), c);
    move<Kind>(from, distance(from.max, max, c), c);
    into.max = max;
    into.sum += from.sum;
    into.weighted += from.weighted;
    into.rest += from.rest;
}

// One logit, of any value.
template <class Kind> static __device__ __forceinline__ void take_one(Running &run, float x, u32 where, float c) {
    Sums &of = run.sums;
    if (!(x < INF)) {
        of.sum = NO_NUMBER;
    } else if (x > -INF) {
        if (x > of.max) {
            move<Kind>(of, distance(of.max, x, c), c);
            of.max = x;
            run.where = where;
        }
        float y = exponent_of(x, of.max, c);
        float e = exp2_of(y);
        of.sum += e;
        if (!Kind::HAS_REST || y < 0.0f) {
            of.rest += e;
            of.weighted = fmaf(y, e, of.weighted);
        }
    }
}

// N vectors at once, the next always THREADS further on; the first is at `from`, which is logit `where` of the row, and
// those from `end` on are masked.
template <class Kind, u32 N>
static __device__ __forceinline__ void take(Running &run, const Vector (&vectors)[N], const typename Kind::Raw *from,
                                            const typename Kind::Raw *end, u32 where, float c) {
    Sums &of = run.sums;
    float top = Kind::template largest<N>(vectors);
    bool is_higher = top > of.max;
    float max = is_higher ? top : of.max;
    float exponent = __fmul_rd(max, c);
    if (!is_plain(exponent)) {
        if (max == -INF) {
            // Only masked logits yet, or a NaN beside them.
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < N * Kind::PER_VECTOR; i++) {
                sum += Kind::get(vectors[i / Kind::PER_VECTOR], i % Kind::PER_VECTOR);
            }
            of.sum = sum == -INF ? of.sum : NO_NUMBER;
        } else {
            // Large beside the temperature, and read again: so that no register needs an index.
#pragma unroll 1
            for (u32 i = 0; i < N * Kind::PER_VECTOR; i++) {
                const typename Kind::Raw *at =
                    from + i / Kind::PER_VECTOR * THREADS * Kind::PER_VECTOR + i % Kind::PER_VECTOR;
                if (at < end) {
                    take_one<Kind>(run, Kind::widened(*at), where, c);
                }
            }
        }
        return;
    }
    Sums read = {max, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < N * Kind::PER_VECTOR; i++) {
        float x = Kind::get(vectors[i / Kind::PER_VECTOR], i % Kind::PER_VECTOR);
        // A NaN stays one: it is found in the sum.
        float y = max_or_nan(fmaf(x, c, -exponent), LOWEST);
        float e = exp2_of(y);
        read.sum += e;
        if (Kind::HAS_REST) {
            // By 0 or 1: the maximum's y is not below 0.
            e *= __saturatef(y * -FLOAT_MAX);
            read.rest += e;
        }
        read.weighted = fmaf(y, e, read.weighted);
    }
    move<Kind>(of, distance_to_plain(of.max, exponent, c), c);
    of.max = max;
    of.sum += read.sum;
    of.weighted += read.weighted;
    of.rest += read.rest;
    run.where = is_higher ? where : run.where;
}

// ---- One block -----------------------------------------------------------------------------------------------------

struct Shared {
    Sums of_warp[WARPS];
    u32 top;
    bool is_last;
};

// The threads' parts put together; every thread returns the same, and finds no top yet.
template <class Kind> static __device__ Sums of_block(Shared &shared, Sums own, float c) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (u32 step = WARP / 2; step > 0; step /= 2) {
        Sums other = {__shfl_xor_sync(0xffffffffu, own.max, step), __shfl_xor_sync(0xffffffffu, own.sum, step),
                      __shfl_xor_sync(0xffffffffu, own.weighted, step), __shfl_xor_sync(0xffffffffu, own.rest, step)};
        merge<Kind>(own, other, c);
    }
    if (lane == 0) {
        shared.of_warp[warp] = own;
    }
    if (threadIdx.x == 0) {
        shared.top = NOWHERE;
    }
    __syncthreads();
    Sums all = shared.of_warp[0];
#pragma unroll 1
    for (u32 i = 1; i < WARPS; i++) {
        merge<Kind>(all, shared.of_warp[i], c);
    }
    return all;
}

// The first logit of the maximum, looked for where it was read; a few threads have any.
template <class Kind>
static __device__ void find_top(Shared &shared, const Running &run, float max, const typename Kind::Raw *row, u32 vocab) {
    if (run.sums.max == max && run.where != NOWHERE) {
#pragma unroll 1
        for (u32 i = 0; i < UNROLL * Kind::PER_VECTOR; i++) {
            u32 index = run.where + i / Kind::PER_VECTOR * THREADS * Kind::PER_VECTOR + i % Kind::PER_VECTOR;
            if (index < vocab && Kind::widened(row[index]) == max) {
                atomicMin(&shared.top, index);
                break;
            }
        }
    }
}

static __device__ void observe(EatState &state, float entropy, float alpha) {
    if (state.probes == 0) {
        state.mean = entropy;
        state.variance = 0.0f;
    } else {
        state.mean = alpha * entropy + (1.0f - alpha) * state.mean;
        float off = entropy - state.mean;
        state.variance = alpha * off * off + (1.0f - alpha) * state.variance;
    }
    state.probes += state.probes == NOWHERE ? 0 : 1;
}

// A row's answer, and the state of its request.
template <class Kind>
static __device__ void answer(const Params &p, u32 at, const typename Kind::Raw *row, const Partial &all, float c) {
    RowStats out = {NO_NUMBER, NO_NUMBER, NO_NUMBER, NO_NUMBER, -1, {0.0f, 0.0f, 0}};
    const Sums &of = all.sums;
    bool is_distribution = of.sum > 0.0f;
    if (is_distribution) {
        float exponent = __fmul_rd(of.max, c), own = own_exponent(of.max, c);
        float ln_sum = logf(of.sum), mean = of.weighted / of.sum;
        out.entropy = fmaf(-LN_2, mean, ln_sum);
        if (Kind::HAS_REST && of.sum - of.rest < 1.5f) {
            // One maximum: all against its own y, which is then 0, and 1 its part of the sum.
            float scale = exp2f(-own), rest = of.rest * scale;
            mean = fmaf(of.weighted, scale, -own * rest) / (1.0f + rest);
            out.entropy = fmaf(-LN_2, mean, log1pf(rest));
        } else if (Kind::HAS_REST) {
            out.entropy = fmaf(-LN_2, fmaf(own, of.sum - of.rest, of.weighted) / of.sum, ln_sum);
        }
        // Rounding may leave a sure row a little below 0.
        out.entropy = fmaxf(out.entropy, 0.0f);
        out.max = of.max;
        out.logsumexp = is_plain(exponent) ? fmaf(exponent, LN_2, ln_sum) : of.max * (c * LN_2) + ln_sum;
        out.top = (int)all.top;
        int token = p.tokens ? p.tokens[at] : -1;
        if (token >= 0 && (u32)token < p.vocab) {
            out.probability = exp2f(exponent_of(Kind::widened(row[token]), of.max, c)) / of.sum;
        }
    }
    int slot = p.slots ? p.slots[at] : -1;
    if (slot >= 0) {
        EatState state = p.states[slot];
        if (is_distribution) {
            observe(state, out.entropy, p.alpha);
            p.states[slot] = state;
        }
        out.eat = state;
    }
    p.answers[at] = out;
}

template <class Kind> static __device__ void measure(const Params &p) {
    SHARED(Shared, shared);
    typedef typename Kind::Raw Raw;
    constexpr u32 PER = Kind::PER_VECTOR;

    u32 at = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
    const Raw *row = (const Raw *)p.logits + (u64)(p.rows ? p.rows[at] : at) * p.row_stride;
    // Not infinite, however cold: 0 times it is 0.
    float c = p.temperatures ? fminf(LOG2_E / p.temperatures[at], FLOAT_MAX) : LOG2_E;

    u32 before = (u32)(-(u64)row % 16 / sizeof(Raw));
    before = before < p.vocab ? before : p.vocab;
    u32 vectors = (p.vocab - before) / PER;
    u32 after = before + vectors * PER;
    const Vector *body = (const Vector *)(row + before);
    u32 i = (u32)((u64)vectors * split / p.splits) + threadIdx.x;
    u32 end = (u32)((u64)vectors * (split + 1) / p.splits);

    Running run;
    if (split == 0 && threadIdx.x < before) {
        take_one<Kind>(run, Kind::widened(row[threadIdx.x]), threadIdx.x, c);
    }
#pragma unroll 1
    for (; i + (UNROLL - 1) * THREADS < end; i += UNROLL * THREADS) {
        Vector read[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; k++) {
            read[k] = load_vector(body + i + k * THREADS);
        }
        take<Kind, UNROLL>(run, read, (const Raw *)(body + i), (const Raw *)(body + end), before + i * PER, c);
    }
    if (i < end) {
        // The rest in one turn too: what is not there is masked.
        Vector read[UNROLL];
#pragma unroll
        for (u32 k = 0; k < UNROLL; k++) {
            read[k] = {{Kind::MASKED, Kind::MASKED, Kind::MASKED, Kind::MASKED}};
            if (i + k * THREADS < end) {
                read[k] = load_vector(body + i + k * THREADS);
            }
        }
        take<Kind, UNROLL>(run, read, (const Raw *)(body + i), (const Raw *)(body + end), before + i * PER, c);
    }
    if (split == p.splits - 1 && after + threadIdx.x < p.vocab) {
        take_one<Kind>(run, Kind::widened(row[after + threadIdx.x]), after + threadIdx.x, c);
    }

    Partial all = {of_block<Kind>(shared, run.sums, c), NOWHERE};
    find_top<Kind>(shared, run, all.sums.max, row, p.vocab);
    __syncthreads();
    all.top = shared.top;
    if (p.splits == 1) {
        if (threadIdx.x == 0) {
            answer<Kind>(p, at, row, all, c);
        }
        return;
    }

    // The last block at this row sees what the others wrote: they wrote it before they took their ticket.
    if (threadIdx.x == 0) {
        p.partials[blockIdx.x] = all;
        __threadfence();
        shared.is_last = atomicAdd(&p.tickets[at], 1) == p.splits - 1;
        __threadfence();
    }
    __syncthreads();
    if (!shared.is_last) {
        return;
    }
    Running parts;
    for (u32 k = threadIdx.x; k < p.splits; k += THREADS) {
        Partial part = load_partial(&p.partials[at * p.splits + k]);
        // Parts come in the order of the row, so the first of two equal maxima stays.
        if (part.sums.max > parts.sums.max) {
            parts.where = part.top;
        }
        merge<Kind>(parts.sums, part.sums, c);
    }
    all.sums = of_block<Kind>(shared, parts.sums, c);
    if (parts.sums.max == all.sums.max && parts.where != NOWHERE) {
        atomicMin(&shared.top, parts.where);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        all.top = shared.top;
        p.tickets[at] = 0;
        answer<Kind>(p, at, row, all, c);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MERIDIAN_BLOCKS) meridian_entropy_f32(const Params p) { measure<F32>(p); }

extern "C" __global__ void __launch_bounds__(THREADS, MERIDIAN_BLOCKS) meridian_entropy_bf16(const Params p) { measure<Bf16>(p); }

extern "C" __global__ void __launch_bounds__(THREADS, MERIDIAN_BLOCKS) meridian_entropy_f16(const Params p) { measure<F16>(p); }
