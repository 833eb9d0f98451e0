// Long thoughts end while other requests wait.

#include <stdlib.h>

#include "budget_policy.h"

// Thoughts up to this length go on.
#define LONG_TOKENS 2048.0f
// More waiting requests than this end a long thought.
#define QUEUE 8

static const char NAME[] = "{{name}}";
static const char VERSION[] = "0.1.0";
static const char SUMMARY[] = "Ends thoughts of more than 2048 tokens while more than 8 requests wait.";

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
    // An object without fields: braces and spaces.
    bool is_empty = true;
    for (size_t i = 0; i < config_json->len; i++) {
        char c = (char)config_json->ptr[i];
        is_empty = is_empty && (c == '{' || c == '}' || c == ' ');
    }
    budget_policy_string_free(config_json);
    if (!is_empty) budget_policy_string_dup(err, "config: this policy takes no options");
    return is_empty;
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
    ret->len = 1;
    ret->ptr = malloc(ret->len * sizeof *ret->ptr);
    ret->ptr[0] = EXPORTS_MERIDIAN_POLICY_BUDGET_COLUMN_THINK_TOKENS;
}

void exports_meridian_policy_budget_start(exports_meridian_policy_budget_load_t *load, uint32_t candidates,
                                          budget_policy_list_f32_t *columns,
                                          exports_meridian_policy_budget_list_thresholds_t *ret) {
    (void)load;
    (void)candidates;
    // An empty list stands for the configured thresholds.
    ret->ptr = NULL;
    ret->len = 0;
    budget_policy_list_f32_free(columns);
}

void exports_meridian_policy_budget_probe(exports_meridian_policy_budget_load_t *load, uint32_t candidates,
                                          budget_policy_list_f32_t *columns,
                                          exports_meridian_policy_budget_list_verdict_t *ret) {
    const float *think_tokens = columns->ptr;
    ret->len = candidates;
    ret->ptr = malloc(candidates * sizeof *ret->ptr);
    for (uint32_t i = 0; i < candidates; i++) {
        bool ends = load->waiting > QUEUE && think_tokens[i] > LONG_TOKENS;
        ret->ptr[i] = ends ? EXPORTS_MERIDIAN_POLICY_BUDGET_VERDICT_END_NOW
                           : EXPORTS_MERIDIAN_POLICY_BUDGET_VERDICT_DEFAULT;
    }
    budget_policy_list_f32_free(columns);
}
