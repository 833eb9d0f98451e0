// The request with the fewest prompt tokens left to compute goes first.

#include <stdlib.h>

#include "dispatch_policy.h"

static const char NAME[] = "{{name}}";
static const char VERSION[] = "0.1.0";
static const char SUMMARY[] = "Fewest prompt tokens to compute first: lowers mean TTFT, delays long prompts.";

void exports_meridian_policy_lifecycle_describe(exports_meridian_policy_lifecycle_description_t *ret) {
    dispatch_policy_string_dup(&ret->name, NAME);
    dispatch_policy_string_dup(&ret->version, VERSION);
    dispatch_policy_string_dup(&ret->summary, SUMMARY);
}

bool exports_meridian_policy_lifecycle_init(exports_meridian_policy_lifecycle_slot_t slot,
                                            exports_meridian_policy_lifecycle_targets_t *targets,
                                            dispatch_policy_string_t *config_json, dispatch_policy_string_t *err) {
    (void)slot;
    (void)targets;
    // An object without fields: braces and spaces.
    bool is_empty = true;
    for (size_t i = 0; i < config_json->len; i++) {
        char c = (char)config_json->ptr[i];
        is_empty = is_empty && (c == '{' || c == '}' || c == ' ');
    }
    dispatch_policy_string_free(config_json);
    if (!is_empty) dispatch_policy_string_dup(err, "config: this policy takes no options");
    return is_empty;
}

// This policy keeps no state of requests.
void exports_meridian_policy_lifecycle_finished(dispatch_policy_list_u32_t *requests) {
    dispatch_policy_list_u32_free(requests);
}

void exports_meridian_policy_lifecycle_snapshot(dispatch_policy_list_u8_t *ret) {
    ret->ptr = NULL;
    ret->len = 0;
}

bool exports_meridian_policy_lifecycle_restore(dispatch_policy_list_u8_t *state, dispatch_policy_string_t *err) {
    (void)err;
    dispatch_policy_list_u8_free(state);
    return true;
}

void exports_meridian_policy_dispatch_inputs(exports_meridian_policy_dispatch_list_column_t *ret) {
    ret->len = 2;
    ret->ptr = malloc(ret->len * sizeof *ret->ptr);
    ret->ptr[0] = EXPORTS_MERIDIAN_POLICY_DISPATCH_COLUMN_PROMPT_TOKENS;
    ret->ptr[1] = EXPORTS_MERIDIAN_POLICY_DISPATCH_COLUMN_CACHED_TOKENS;
}

void exports_meridian_policy_dispatch_decide(exports_meridian_policy_dispatch_step_t *step, uint32_t candidates,
                                             dispatch_policy_list_f32_t *columns,
                                             exports_meridian_policy_dispatch_decision_t *ret) {
    (void)step;
    const float *prompt = columns->ptr, *cached = columns->ptr + candidates;
    ret->keys.len = candidates;
    ret->keys.ptr = malloc(candidates * sizeof(float));
    // Lower goes first; the host sorts.
    for (uint32_t i = 0; i < candidates; i++) ret->keys.ptr[i] = prompt[i] - cached[i];
    ret->token_budget.is_some = false;
    ret->token_caps.ptr = NULL;
    ret->token_caps.len = 0;
    ret->victim_keys.ptr = NULL;
    ret->victim_keys.len = 0;
    dispatch_policy_list_f32_free(columns);
}
