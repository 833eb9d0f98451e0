// The C ABI from C: what the calls answer, what they refuse, and what they say then. Compiles as C11 and as C++17.

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "meridian_kernels.h"

static_assert(sizeof(MeridianEntropyLaunch) == 88, "size");
static_assert(offsetof(MeridianEntropyLaunch, device) == 8, "device");
static_assert(offsetof(MeridianEntropyLaunch, element) == 12, "element");
static_assert(offsetof(MeridianEntropyLaunch, logits) == 16, "logits");
static_assert(offsetof(MeridianEntropyLaunch, rows) == 24, "rows");
static_assert(offsetof(MeridianEntropyLaunch, vocab) == 28, "vocab");
static_assert(offsetof(MeridianEntropyLaunch, row_stride) == 32, "row_stride");
static_assert(offsetof(MeridianEntropyLaunch, row_indices) == 40, "row_indices");
static_assert(offsetof(MeridianEntropyLaunch, count) == 48, "count");
static_assert(offsetof(MeridianEntropyLaunch, flags) == 52, "flags");
static_assert(offsetof(MeridianEntropyLaunch, tokens) == 56, "tokens");
static_assert(offsetof(MeridianEntropyLaunch, device_tokens) == 64, "device_tokens");
static_assert(offsetof(MeridianEntropyLaunch, temperatures) == 72, "temperatures");
static_assert(offsetof(MeridianEntropyLaunch, stream) == 80, "stream");
static_assert(sizeof(MeridianEat) == 32, "size");
static_assert(offsetof(MeridianEat, alpha) == 28, "alpha");
static_assert(sizeof(MeridianEatState) == 12, "size");
static_assert(sizeof(MeridianRowStats) == 32, "size");
static_assert(offsetof(MeridianRowStats, eat) == 20, "eat");

static int failures = 0;

#define CHECK(holds)                                               \
    do {                                                           \
        if (!(holds)) {                                            \
            failures++;                                            \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #holds);     \
        }                                                          \
    } while (0)

// [example]
// Entropy in nats of rows of f32 logits that lie one after the other in the machine's memory, and of one token a row
// how likely it is. Returns MERIDIAN_OK, or says what is wrong.
static int32_t measure(const float *logits, uint32_t rows, uint32_t vocab, const int32_t *tokens,
                       MeridianRowStats *out) {
    MeridianEntropyLaunch launch;
    memset(&launch, 0, sizeof launch);
    launch.struct_size = sizeof launch;
    launch.device = MERIDIAN_CPU;
    launch.element = MERIDIAN_F32;
    launch.logits = logits;
    launch.rows = rows;
    launch.vocab = vocab;
    launch.row_stride = vocab;
    launch.count = rows;
    launch.tokens = tokens;

    MeridianPending *pending;
    int32_t code = meridian_entropy_launch(&launch, &pending);
    if (code == MERIDIAN_OK) {
        code = meridian_pending_wait(pending, out, rows);
    }
    if (code != MERIDIAN_OK) {
        char text[256];
        meridian_last_error(text, sizeof text);
        fprintf(stderr, "meridian: %d: %s\n", (int)code, text);
    }
    return code;
}
// [/example]

static int near(float got, double expected) { return fabs((double)got - expected) < 1e-6; }

static const float LOGITS[3][4] = {
    {0.5f, 0.5f, 0.5f, 0.5f}, {-INFINITY, 3.0f, -INFINITY, -200.0f}, {0.0f, NAN, 1.0f, 2.0f}};

// The three rows above, all of them.
static MeridianEntropyLaunch three(void) {
    MeridianEntropyLaunch launch;
    memset(&launch, 0, sizeof launch);
    launch.struct_size = sizeof launch;
    launch.device = MERIDIAN_CPU;
    launch.element = MERIDIAN_F32;
    launch.logits = LOGITS;
    launch.rows = 3;
    launch.vocab = 4;
    launch.row_stride = 4;
    launch.count = 3;
    return launch;
}

static int said(const char *expected) {
    char text[512];
    size_t length = meridian_last_error(text, sizeof text);
    if (length == strlen(expected) && strcmp(text, expected) == 0) {
        return 1;
    }
    printf("said: %s\nnot:  %s\n", text, expected);
    return 0;
}

static int begins(const char *expected) {
    char text[512];
    meridian_last_error(text, sizeof text);
    return strncmp(text, expected, strlen(expected)) == 0;
}

static void values(void) {
    const int32_t tokens[3] = {2, 1, 0};
    MeridianRowStats out[3];
    CHECK(measure(&LOGITS[0][0], 3, 4, tokens, out) == MERIDIAN_OK);
    CHECK(near(out[0].entropy, log(4.0)) && near(out[0].probability, 0.25));
    CHECK(near(out[0].logsumexp, 0.5 + log(4.0)) && near(out[0].max, 0.5) && out[0].top == 0);
    CHECK(near(out[1].entropy, 0.0) && near(out[1].probability, 1.0) && out[1].top == 1);
    CHECK(isnan(out[2].entropy) && isnan(out[2].max) && isnan(out[2].probability) && out[2].top == -1);
    CHECK(out[0].eat.probes == 0);
    CHECK(measure(&LOGITS[0][0], 3, 0, tokens, out) == MERIDIAN_BAD_SHAPE);

    // Chosen rows of bfloat16 with gaps between them, each with its temperature.
    const uint16_t brain[10] = {0x3f80, 0x4000, 0x4040, 0x7fc0, 0x7fc0, 0x4080, 0x0000, 0x4080, 0x7fc0, 0x7fc0};
    const uint32_t rows[4] = {1, 0, 1, 1};
    const float temperatures[4] = {1.0f, 2.0f, 0.5f, 1.0f};
    const int32_t chosen[4] = {1, 2, 2, 3};
    MeridianEntropyLaunch launch = three();
    launch.element = MERIDIAN_BF16;
    launch.logits = brain;
    launch.rows = 2;
    launch.vocab = 3;
    launch.row_stride = 5;
    launch.row_indices = rows;
    launch.count = 4;
    launch.tokens = chosen;
    launch.temperatures = temperatures;
    launch.flags = MERIDIAN_LOGITS_KEPT;
    MeridianPending *pending;
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_OK);
    CHECK(meridian_pending_ready(pending) == 1);
    CHECK(strncmp(meridian_pending_backend(pending), "cpu-", 4) == 0);
    MeridianRowStats four[4];
    CHECK(meridian_pending_wait(pending, four, 4) == MERIDIAN_OK);
    CHECK(near(four[0].probability, exp(-4.0) / (2.0 + exp(-4.0))) && four[0].top == 0);
    CHECK(near(four[1].logsumexp, log(exp(0.5) + exp(1.0) + exp(1.5))) && four[1].top == 2);
    CHECK(near(four[2].probability, 1.0 / (2.0 + exp(-8.0))));
    CHECK(near(four[3].entropy, four[0].entropy) && isnan(four[3].probability));

    // No rows.
    launch.count = 0;
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_OK);
    CHECK(meridian_pending_wait(pending, NULL, 0) == MERIDIAN_OK);
}

// Three probes of one request beside a row that is no probe, then a row that is no distribution, then refusals.
static void eat(void) {
    MeridianEatState states[2];
    memset(states, 0, sizeof states);
    double mean = 0.0, variance = 0.0;
    for (int probe = 0; probe < 3; probe++) {
        const float logits[2][3] = {{0.0f, (float)probe, 1.0f}, {1.0f, 1.0f, 1.0f}};
        int32_t slots[2] = {1, -1};
        MeridianEntropyLaunch launch = three();
        launch.logits = logits;
        launch.rows = 2;
        launch.vocab = 3;
        launch.row_stride = 3;
        launch.count = 2;
        MeridianEat request;
        memset(&request, 0, sizeof request);
        request.struct_size = sizeof request;
        request.slots = slots;
        request.states = states;
        request.len = 2;
        request.alpha = 0.25f;
        MeridianPending *pending;
        MeridianRowStats out[2];
        CHECK(meridian_eat_launch(&launch, &request, &pending) == MERIDIAN_OK);
        slots[0] = 77; // The arrays of the request were read.
        CHECK(meridian_pending_wait(pending, out, 2) == MERIDIAN_OK);
        const double x = (double)out[0].entropy;
        if (probe == 0) {
            mean = x;
        } else {
            mean = 0.25 * x + 0.75 * mean;
            variance = 0.25 * (x - mean) * (x - mean) + 0.75 * variance;
        }
        CHECK(near(states[1].mean, mean) && near(states[1].variance, variance));
        CHECK(states[1].probes == (uint32_t)probe + 1 && states[0].probes == 0);
        CHECK(memcmp(&out[0].eat, &states[1], sizeof states[1]) == 0 && out[1].eat.probes == 0);
    }

    const MeridianEatState before = states[1];
    const int32_t slots[3] = {-1, -1, 1};
    MeridianEntropyLaunch launch = three();
    MeridianEat request;
    memset(&request, 0, sizeof request);
    request.struct_size = sizeof request;
    request.slots = slots;
    request.states = states;
    request.len = 2;
    request.alpha = 0.25f;
    MeridianPending *pending;
    CHECK(meridian_eat_launch(&launch, &request, &pending) == MERIDIAN_OK);
    meridian_pending_drop(pending);
    CHECK(memcmp(&before, &states[1], sizeof before) == 0);

#define REFUSED(field, value, code, text)                                  \
    do {                                                                   \
        MeridianEat wrong = request;                                       \
        wrong.field = value;                                               \
        CHECK(meridian_eat_launch(&launch, &wrong, &pending) == (code));   \
        CHECK(pending == NULL && said(text));                              \
    } while (0)
    const int32_t twice[3] = {0, 1, 1};
    REFUSED(struct_size, 31, MERIDIAN_BAD_SHAPE,
            "struct_size: 31: expected sizeof of a version of the struct that this library knows");
    REFUSED(slots, NULL, MERIDIAN_NULL_POINTER, "slots: null pointer");
    REFUSED(slots, twice, MERIDIAN_BAD_VALUE, "slots: 1: expected -1, or one of the states, for one row only");
    REFUSED(states, NULL, MERIDIAN_NULL_POINTER, "states: null pointer");
    REFUSED(len, 1, MERIDIAN_BAD_VALUE, "slots: 1: expected -1, or one of the states, for one row only");
    REFUSED(alpha, 1.5f, MERIDIAN_BAD_VALUE, "alpha: 1.5: expected in (0, 1]");
#undef REFUSED
    CHECK(meridian_eat_launch(&launch, NULL, &pending) == MERIDIAN_NULL_POINTER && said("eat: null pointer"));
    CHECK(memcmp(&before, &states[1], sizeof before) == 0);
}

static void refusals(void) {
    MeridianPending *pending;
#define REFUSED(field, value, code, text)                                     \
    do {                                                                      \
        MeridianEntropyLaunch wrong = three();                                \
        wrong.field = value;                                                  \
        CHECK(meridian_entropy_launch(&wrong, &pending) == (code));           \
        CHECK(pending == NULL && said(text));                                 \
    } while (0)
    const char *const size = "expected sizeof of a version of the struct that this library knows";
    const uint64_t sizes[] = {0, 8, 80, 87, 89, 96, UINT64_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char text[256];
        snprintf(text, sizeof text, "struct_size: %llu: %s", (unsigned long long)sizes[i], size);
        REFUSED(struct_size, sizes[i], MERIDIAN_BAD_SHAPE, text);
    }
    const void *const between = (const char *)LOGITS + 2;
    const uint32_t rows[3] = {0, 3, 0};
    const float temperatures[3] = {1.0f, 0.0f, 1.0f};
    const int32_t tokens[3] = {0, 0, 0};
    REFUSED(device, -2, MERIDIAN_BAD_VALUE, "device: -2: expected MERIDIAN_CPU, or the number of a CUDA device");
    REFUSED(element, 3, MERIDIAN_BAD_VALUE, "element: 3: expected MERIDIAN_F32, MERIDIAN_BF16 or MERIDIAN_F16");
    REFUSED(flags, 2, MERIDIAN_BAD_VALUE, "flags: 2: expected 0 or MERIDIAN_LOGITS_KEPT");
    REFUSED(logits, NULL, MERIDIAN_NULL_POINTER, "logits: null pointer");
    REFUSED(vocab, 0, MERIDIAN_BAD_SHAPE, "vocab: 0: expected at least 1");
    REFUSED(vocab, (1u << 24) + 1, MERIDIAN_BAD_SHAPE, "row_stride: 4: expected at least the vocabulary");
    REFUSED(row_stride, 3, MERIDIAN_BAD_SHAPE, "row_stride: 3: expected at least the vocabulary");
    REFUSED(row_stride, UINT64_MAX, MERIDIAN_BAD_SHAPE,
            "rows: 3: expected a matrix that fits into the address space");
    REFUSED(rows, 4, MERIDIAN_BAD_SHAPE, "count: 3: expected the number of rows, where row_indices is null");
    REFUSED(count, 0, MERIDIAN_BAD_SHAPE, "count: 0: expected the number of rows, where row_indices is null");
    REFUSED(count, 65537, MERIDIAN_BAD_SHAPE, "count: 65537: expected at most 65536 in one launch");
    REFUSED(row_indices, rows, MERIDIAN_ROW_OUT_OF_RANGE, "rows: 3: expected less than 3");
    REFUSED(temperatures, temperatures, MERIDIAN_BAD_VALUE, "temperatures: 0: expected a finite number above 0");
    REFUSED(device_tokens, tokens, MERIDIAN_BAD_VALUE,
            "tokens: on a device: expected tokens in the machine's memory for logits there");
#undef REFUSED
    MeridianEntropyLaunch launch = three();
    launch.logits = between;
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_BAD_SHAPE && begins("logits: "));
    launch = three();
    launch.tokens = tokens;
    launch.device_tokens = tokens;
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_BAD_VALUE);
    CHECK(said("tokens: in both memories: expected at most one of tokens and device_tokens"));
    launch = three();
    launch.row_indices = (const uint32_t *)between;
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_BAD_SHAPE && begins("row_indices: "));
    CHECK(meridian_entropy_launch(NULL, &pending) == MERIDIAN_NULL_POINTER && said("launch: null pointer"));
    launch = three();
    CHECK(meridian_entropy_launch(&launch, NULL) == MERIDIAN_NULL_POINTER && said("pending: null pointer"));

    // No machine has as many devices. Where there is no driver, that is what is said.
    launch.device = 1000;
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_UNAVAILABLE && pending == NULL);
    CHECK(begins("not available on this machine: "));
}

static void handles(void) {
    MeridianPending *pending;
    MeridianRowStats out[3];
    MeridianEntropyLaunch launch = three();
    CHECK(meridian_pending_ready(NULL) == MERIDIAN_NULL_POINTER && said("pending: null pointer"));
    CHECK(meridian_pending_backend(NULL) == NULL);
    CHECK(meridian_pending_wait(NULL, out, 3) == MERIDIAN_NULL_POINTER);
    meridian_pending_drop(NULL);

    // The handle is freed also where the answers do not fit, and nothing is written.
    out[0].top = 77;
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_OK);
    CHECK(meridian_pending_wait(pending, out, 2) == MERIDIAN_BAD_SHAPE);
    CHECK(said("out: 2: expected one value a row asked for") && out[0].top == 77);
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_OK);
    CHECK(meridian_pending_wait(pending, NULL, 3) == MERIDIAN_NULL_POINTER && said("out: null pointer"));
    CHECK(meridian_entropy_launch(&launch, &pending) == MERIDIAN_OK);
    meridian_pending_drop(pending);
}

// As snprintf: always ended by a 0, and the length of the whole.
static void last_error(void) {
    char text[8] = "1234567";
    CHECK(said(""));
    CHECK(meridian_pending_ready(NULL) == MERIDIAN_NULL_POINTER);
    const size_t whole = strlen("pending: null pointer");
    CHECK(meridian_last_error(NULL, 0) == whole);
    CHECK(meridian_last_error(text, 0) == whole && strcmp(text, "1234567") == 0);
    CHECK(meridian_last_error(text, sizeof text) == whole && strcmp(text, "pending") == 0);
    CHECK(meridian_last_error(text, 1) == whole && text[0] == 0);
}

int main(void) {
    CHECK(meridian_kernels_abi_version() == MERIDIAN_KERNELS_ABI_VERSION);
    last_error();
    values();
    eat();
    refusals();
    handles();
    return failures == 0 ? 0 : 1;
}
