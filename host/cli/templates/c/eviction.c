// Blocks that were never matched again go first, the end of a chain before its head.

#include <stdlib.h>

#include "eviction_policy.h"

static const char NAME[] = "{{name}}";
static const char VERSION[] = "0.1.0";
static const char SUMMARY[] = "Blocks with few matches and far from the head of their chain go first.";

void exports_meridian_policy_lifecycle_describe(exports_meridian_policy_lifecycle_description_t *ret) {
    eviction_policy_string_dup(&ret->name, NAME);
    eviction_policy_string_dup(&ret->version, VERSION);
    eviction_policy_string_dup(&ret->summary, SUMMARY);
}

bool exports_meridian_policy_lifecycle_init(exports_meridian_policy_lifecycle_slot_t slot,
                                            exports_meridian_policy_lifecycle_targets_t *targets,
                                            eviction_policy_string_t *config_json, eviction_policy_string_t *err) {
    (void)slot;
    (void)targets;
    // An object without fields: braces and spaces.
    bool is_empty = true;
    for (size_t i = 0; i < config_json->len; i++) {
        char c = (char)config_json->ptr[i];
        is_empty = is_empty && (c == '{' || c == '}' || c == ' ');
    }
    eviction_policy_string_free(config_json);
    if (!is_empty) eviction_policy_string_dup(err, "config: this policy takes no options");
    return is_empty;
}

// This policy keeps no state of requests.
void exports_meridian_policy_lifecycle_finished(eviction_policy_list_u32_t *requests) {
    eviction_policy_list_u32_free(requests);
}

void exports_meridian_policy_lifecycle_snapshot(eviction_policy_list_u8_t *ret) {
    ret->ptr = NULL;
    ret->len = 0;
}

bool exports_meridian_policy_lifecycle_restore(eviction_policy_list_u8_t *state, eviction_policy_string_t *err) {
    (void)err;
    eviction_policy_list_u8_free(state);
    return true;
}

void exports_meridian_policy_eviction_inputs(exports_meridian_policy_eviction_list_column_t *ret) {
    ret->len = 2;
    ret->ptr = malloc(ret->len * sizeof *ret->ptr);
    ret->ptr[0] = EXPORTS_MERIDIAN_POLICY_EVICTION_COLUMN_HITS;
    ret->ptr[1] = EXPORTS_MERIDIAN_POLICY_EVICTION_COLUMN_POSITION;
}

void exports_meridian_policy_eviction_rank(exports_meridian_policy_eviction_memory_t *memory, uint32_t candidates,
                                           eviction_policy_list_f32_t *columns,
                                           exports_meridian_policy_eviction_ranking_t *ret) {
    (void)memory;
    const float *hits = columns->ptr, *position = columns->ptr + candidates;
    ret->keys.len = candidates;
    ret->keys.ptr = malloc(candidates * sizeof(float));
    // Lower goes first; the host sorts.
    for (uint32_t i = 0; i < candidates; i++) ret->keys.ptr[i] = hits[i] - position[i];
    // No block is kept for a time.
    ret->keep_ms.ptr = NULL;
    ret->keep_ms.len = 0;
    eviction_policy_list_f32_free(columns);
}
