// The rule of policies/shipped/src/deer.rs in C: thinking ends when the model is confident of its answer.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "budget_policy.h"

static const char NAME[] = "deer-c";
static const char VERSION[] = "0.1.0";
static const char SUMMARY[] = "Ends thinking when the model is confident of its answer.";
static const char KEY[] = "\"confidence\"";
static const char EXPECTED[] = "confidence: must be a decimal fraction, at least 0 and below 1";

static double confidence = 0.95;

// Read `{}` or `{"confidence": 0.95}`.
static bool read_config(const char *at, const char *end) {
    while (at < end && (*at == '{' || *at == ' ')) at++;
    if (at < end && *at == '}') return true;
    if ((size_t)(end - at) < strlen(KEY) || memcmp(at, KEY, strlen(KEY)) != 0) return false;
    at += strlen(KEY);
    while (at < end && (*at == ':' || *at == ' ')) at++;
    if (end - at < 2 || at[0] != '0') return false;
    // Both are exact up to 15 digits, so the quotient is the nearest number, as any other reader finds it.
    double digits = 0.0, scale = 1.0;
    if (at[1] == '.') {
        const char *most = at + 2 + 15;
        for (at += 2; at < end && at < most && *at >= '0' && *at <= '9'; at++) {
            digits = 10.0 * digits + (*at - '0');
            scale *= 10.0;
        }
    } else {
        at++;
    }
    while (at < end && *at == ' ') at++;
    confidence = digits / scale;
    return at < end && *at == '}';
}

void exports_meridian_policy_lifecycle_describe(exports_meridian_policy_lifecycle_description_t *ret) {
    budget_policy_string_dup(&ret->name, NAME);
    budget_policy_string_dup(&ret->version, VERSION);
    budget_policy_string_dup(&ret->summary, SUMMARY);
}

bool exports_meridian_policy_lifecycle_init(exports_meridian_policy_lifecycle_slot_t slot,
                                            exports_meridian_policy_lifecycle_targets_t *targets,
                                            budget_policy_string_t *config_json, budget_policy_string_t *err) {
    (void)slot;
    (void)targets;
    const char *text = (const char *)config_json->ptr;
    bool is_read = config_json->len == 0 || read_config(text, text + config_json->len);
    budget_policy_string_free(config_json);
    if (!is_read) budget_policy_string_dup(err, EXPECTED);
    return is_read;
}

// This policy keeps no state of requests.
void exports_meridian_policy_lifecycle_finished(budget_policy_list_u32_t *requests) {
    budget_policy_list_u32_free(requests);
}

void exports_meridian_policy_lifecycle_snapshot(budget_policy_list_u8_t *ret) {
    ret->ptr = NULL;
    ret->len = 0;
}

bool exports_meridian_policy_lifecycle_restore(budget_policy_list_u8_t *state, budget_policy_string_t *err) {
    (void)err;
    budget_policy_list_u8_free(state);
    return true;
}

void exports_meridian_policy_budget_inputs(exports_meridian_policy_budget_list_column_t *ret) {
    ret->len = 2;
    ret->ptr = malloc(ret->len * sizeof *ret->ptr);
    ret->ptr[0] = EXPORTS_MERIDIAN_POLICY_BUDGET_COLUMN_SIGNAL;
    ret->ptr[1] = EXPORTS_MERIDIAN_POLICY_BUDGET_COLUMN_CONFIDENCE;
}

void exports_meridian_policy_budget_start(exports_meridian_policy_budget_load_t *load, uint32_t candidates,
                                          budget_policy_list_f32_t *columns,
                                          exports_meridian_policy_budget_list_thresholds_t *ret) {
    // The host's own rules are off.
    exports_meridian_policy_budget_thresholds_t own = load->configured;
    own.eat_variance_threshold = 0.0;
    own.rpdi_threshold = INFINITY;
    ret->len = candidates;
    ret->ptr = malloc(candidates * sizeof *ret->ptr);
    for (uint32_t i = 0; i < candidates; i++) ret->ptr[i] = own;
    budget_policy_list_f32_free(columns);
}

void exports_meridian_policy_budget_probe(exports_meridian_policy_budget_load_t *load, uint32_t candidates,
                                          budget_policy_list_f32_t *columns,
                                          exports_meridian_policy_budget_list_verdict_t *ret) {
    (void)load;
    const float *signal = columns->ptr, *confidences = columns->ptr + candidates;
    ret->len = candidates;
    ret->ptr = malloc(candidates * sizeof *ret->ptr);
    for (uint32_t i = 0; i < candidates; i++) {
        bool is_probed = signal[i] == 1.0f || signal[i] == 3.0f;
        // A confidence that is NaN is not above.
        bool ends = (double)confidences[i] > confidence;
        ret->ptr[i] = !is_probed ? EXPORTS_MERIDIAN_POLICY_BUDGET_VERDICT_DEFAULT
                      : ends     ? EXPORTS_MERIDIAN_POLICY_BUDGET_VERDICT_END_NOW
                                 : EXPORTS_MERIDIAN_POLICY_BUDGET_VERDICT_KEEP_THINKING;
    }
    budget_policy_list_f32_free(columns);
}
