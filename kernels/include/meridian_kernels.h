// Entropy of rows of logits: how sure a model is of its next token. On the CPU and on CUDA devices.
//
// Generated from kernels/src/ffi.rs. Pointers are 64 bits.

#ifndef MERIDIAN_KERNELS_H
#define MERIDIAN_KERNELS_H

#include <stddef.h>
#include <stdint.h>

// Version of this interface. Within a version, structs may grow at their ends, and names may be added; nothing else
// changes.
#define MERIDIAN_KERNELS_ABI_VERSION 1

// IEEE 754 single precision.
#define MERIDIAN_F32 0

// The upper 16 bits of a single.
#define MERIDIAN_BF16 1

// IEEE 754 half precision.
#define MERIDIAN_F16 2

// The logits are in the machine's memory.
#define MERIDIAN_CPU -1

// Nothing later on the stream writes to the logits before the answers are there. Without this flag, later work on the
// stream waits on the device until the logits are read.
#define MERIDIAN_LOGITS_KEPT 1

// The call did what it says.
#define MERIDIAN_OK 0

// This machine, or this build, does not have what was asked for: the driver, the device, the processor's instructions.
#define MERIDIAN_UNAVAILABLE -1

// The kernels do not compile on this machine.
#define MERIDIAN_COMPILE -2

// Too many launches are under way: wait for some of them first.
#define MERIDIAN_BUSY -3

// A pointer that must not be NULL is.
#define MERIDIAN_NULL_POINTER -4

// A size, count or address does not fit the others.
#define MERIDIAN_BAD_SHAPE -5

// A value is none of those allowed.
#define MERIDIAN_BAD_VALUE -6

// A row is asked for that the matrix does not have.
#define MERIDIAN_ROW_OUT_OF_RANGE -7

// A bug of this library.
#define MERIDIAN_INTERNAL -8

// A launch failed: only from meridian_pending_ready, where a positive value is no CUresult.
#define MERIDIAN_LAUNCH_FAILED -9

// A launch whose answers were not taken yet. One thread at a time may use it.
typedef struct MeridianPending MeridianPending;

// A matrix of logits, and what is asked of it. Set what is not needed to 0. The arrays in the machine's memory are read
// during the call only.
typedef struct MeridianEntropyLaunch {
    // sizeof(MeridianEntropyLaunch).
    uint64_t struct_size;
    // MERIDIAN_CPU, or the number of a CUDA device among those that this process sees.
    int32_t device;
    // MERIDIAN_F32, MERIDIAN_BF16 or MERIDIAN_F16.
    uint32_t element;
    // The first logit, in the memory of the device; a multiple of a logit's size.
    const void *logits;
    // Rows of the matrix.
    uint32_t rows;
    // Logits in a row, 1 to 2^24.
    uint32_t vocab;
    // From the first logit of a row to the first of the next, in logits; at least vocab.
    uint64_t row_stride;
    // The rows asked for, count of them, in the order of the answers; NULL for all, and count is then rows.
    const uint32_t *row_indices;
    // Rows asked for, at most 65536: how long every array here is, and the answer.
    uint32_t count;
    // MERIDIAN_LOGITS_KEPT, or 0.
    uint32_t flags;
    // For each row asked for a token whose probability is wanted, such as -1 for none; NULL for no row.
    const int32_t *tokens;
    // `tokens` in the memory of the device, ordered before the launch as the logits are; one of the two is NULL.
    const int32_t *device_tokens;
    // For each row asked for what its logits are divided by, finite and above 0; NULL for 1.
    const float *temperatures;
    // The CUstream on which the logits are made; NULL for the legacy default stream. Unused on the CPU.
    void *stream;
} MeridianEntropyLaunch;

// The state of EAT for one request: exponential moving mean and variance of the entropies of its probes.
//
// `M_0 = x_0`, `V_0 = 0`, then `M_i = a x_i + (1 - a) M_(i-1)` and `V_i = a (x_i - M_i)^2 + (1 - a) V_(i-1)`, with the
// updated mean (arXiv 2509.26522). In nats and nats squared. All zero is a request that was not probed yet.
typedef struct MeridianEatState {
    // `M_i`.
    float mean;
    // `V_i`.
    float variance;
    // Probes so far, those whose row was no distribution not counted.
    uint32_t probes;
} MeridianEatState;

// Rows that are probes of EAT, and where the states of their requests are.
typedef struct MeridianEat {
    // sizeof(MeridianEat).
    uint64_t struct_size;
    // For each row asked for the place of its state in states, each place once; -1 for a row that is no probe. In the
    // machine's memory, read during the call only.
    const int32_t *slots;
    // In the memory of the device. All zero is a request that was not probed yet.
    struct MeridianEatState *states;
    // States there are.
    uint32_t len;
    // Weight of the newest entropy, in (0, 1].
    float alpha;
} MeridianEat;

// What one row of logits `x` says, with `p = softmax(x / T)`.
typedef struct MeridianRowStats {
    // `-sum p ln p`, nats. NaN when the row is no distribution: only `-inf`, or a NaN or `+inf` in it.
    float entropy;
    // The largest logit, as it is in memory: not divided by `T`. NaN when the row is no distribution.
    float max;
    // `ln sum exp(x / T)`. NaN when the row is no distribution.
    float logsumexp;
    // `p` of the token that was asked for. NaN when none was, or the row is no distribution.
    float probability;
    // The first token with the largest logit; -1 when the row is no distribution.
    int32_t top;
    // For the row of a probe, its request's state with this row taken in; all zero otherwise.
    struct MeridianEatState eat;
} MeridianRowStats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library: MERIDIAN_KERNELS_ABI_VERSION of the header that it was built with.
uint32_t meridian_kernels_abi_version(void);

// Begin to measure rows of logits: on the CPU at once, on the caller's thread; on a CUDA device on a stream of its own,
// after what is on the given one. On success *pending is a handle for meridian_pending_wait or meridian_pending_drop,
// one of which must get it; otherwise *pending is NULL, and nothing was launched if the result is negative.
//
// A positive result is the CUresult of a launch that failed, of which the device may have done a part.
//
// # Safety
//
// The matrix is initialized memory of one allocation on the device. On the CPU nobody writes to it during the call; on a
// CUDA device it stays allocated until the answers are there, and what writes to it before that is on the stream, or
// ordered after it. The stream is a live one of the device's primary context. Arrays are as long as they are said to be.
int32_t meridian_entropy_launch(const struct MeridianEntropyLaunch *launch,
                                struct MeridianPending **pending);

// Begins a launch as meridian_entropy_launch does, and lets the rows that are probes of EAT move the states of their
// requests on: on a CUDA device in the order of the launches.
//
// # Safety
//
// As meridian_entropy_launch; and nobody else touches the states until the answers are there.
int32_t meridian_eat_launch(const struct MeridianEntropyLaunch *launch,
                            const struct MeridianEat *eat,
                            struct MeridianPending **pending);

// Whether meridian_pending_wait would not block: 1 when the answers are there, 0 when they are not yet, otherwise a
// negative code; MERIDIAN_LAUNCH_FAILED when the device failed, with which CUresult meridian_pending_wait says.
//
// # Safety
//
// The handle is NULL or one that was not given to meridian_pending_wait or meridian_pending_drop.
int32_t meridian_pending_ready(const struct MeridianPending *pending);

// What runs it: "cpu-portable", "cpu-avx2", "cpu-avx512" or "cuda", a string that is never freed. NULL for NULL.
//
// # Safety
//
// As meridian_pending_ready.
const char *meridian_pending_backend(const struct MeridianPending *pending);

// Waits for the answers, copies them to out in the order of the rows asked for, and frees the handle, also when it
// fails; out is untouched then. len is the count of the launch. A positive result is a CUresult of the device.
//
// # Safety
//
// As meridian_pending_ready; len structs can be written to out.
int32_t meridian_pending_wait(struct MeridianPending *pending, struct MeridianRowStats *out, uint32_t len);

// Frees a handle whose answers nobody wants. NULL is fine.
//
// # Safety
//
// As meridian_pending_ready.
void meridian_pending_drop(struct MeridianPending *pending);

// The text of the last failure of a call on this thread, in UTF-8; empty when none failed. As snprintf does, it writes
// at most length bytes, the last of which is 0, and returns the bytes of the whole text without the 0.
//
// # Safety
//
// length bytes can be written to buffer, which may be NULL when length is 0.
size_t meridian_last_error(char *buffer, size_t length);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MERIDIAN_KERNELS_H */
