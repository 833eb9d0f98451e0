//! meridian.toml: what is accepted, and how a mistake is named.

use meridian_core::config::{self, Auto, Listen, Origin, SlotMode};
use meridian_core::{Budget, Eviction, MeridianConfig, SlotConfig, SlotKind};
use proptest::prelude::*;

fn parse(text: &str) -> MeridianConfig {
    MeridianConfig::from_toml(text).unwrap()
}

fn refusal(text: &str) -> String {
    let message = MeridianConfig::from_toml(text).expect_err("the text is wrong").to_string();
    assert!(!message.contains(char::is_control), "{message:?} is not one line");
    assert!(message.chars().all(meridian_core::text::is_printable), "{message:?} steers a terminal");
    message
}

/// The text that sets one field, and whatever must go with it.
fn set(path: &str, value: &str) -> String {
    let (table, name) = path.rsplit_once('.').unwrap();
    let companion = match path {
        "scheduler.max_think_tokens" => "\nmin_think_tokens = 0",
        "scheduler.min_think_tokens" => "\nmax_think_tokens = 16777216",
        "model.force_phrase" => "\nthink_end = '</think>'",
        "admin.tls_cert_file" if value != "\"\"" => "\ntls_key_file = 'key.pem'",
        "admin.tls_key_file" if value != "\"\"" => "\ntls_cert_file = 'cert.pem'",
        _ => "",
    };
    format!("[{table}]\n{name} = {value}{companion}\n")
}

#[test]
fn empty_means_defaults() {
    let config = parse("");
    assert_eq!(config, MeridianConfig::default());
    assert_eq!(config.policy.dispatch, SlotConfig::dispatch());
    let slots = [&config.policy.dispatch, &config.policy.eviction, &config.policy.budget];
    let facts = slots.map(|slot| (slot.source.as_str(), slot.deadline_ms, slot.memory_mib, slot.mode));
    assert_eq!(
        facts,
        [
            ("native:balanced", 2.0, 64, SlotMode::Active),
            ("native:tiered-lru", 2.0, 64, SlotMode::Active),
            ("native:eat-rpdi", 5.0, 64, SlotMode::Active),
        ]
    );
    assert_eq!(config.scheduler.output_tpot_budget_ms, 20.0);
    assert_eq!(config.entropy.eat_variance_threshold, 0.000_976_562_5);
    assert_eq!(config.kv_memory.evict_dead_thinking, Auto::Auto);
}

#[test]
fn the_default_of_every_field_can_be_written_down() {
    for field in config::fields() {
        let text = set(&field.path, &field.default.to_string());
        let parsed = MeridianConfig::parse(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let effective = parsed.fields.iter().find(|effective| effective.path == field.path).unwrap();
        assert_eq!((&effective.value, &effective.origin), (&field.default, &Origin::File), "{}", field.path);
        let others = parsed.fields.iter().filter(|effective| effective.origin == Origin::File).count();
        assert_eq!(others, text.matches(" = ").count(), "{text}");
    }
    let default = toml::to_string(&MeridianConfig::default()).unwrap();
    assert_eq!(parse(&default), MeridianConfig::default());
    assert_eq!(MeridianConfig::default().validate(), Ok(()));
}

#[test]
fn a_slot_keeps_its_own_defaults_when_one_field_is_given() {
    let config = parse("[policy.budget]\nmemory_mib = 8\n[policy.eviction]\nmode = 'shadow'");
    assert_eq!((config.policy.budget.deadline_ms, config.policy.budget.memory_mib), (5.0, 8));
    assert_eq!(config.policy.eviction.source, "native:tiered-lru");
    assert_eq!(config.policy.eviction.mode, SlotMode::Shadow);
}

/// (field, accepted, refused, expectation)
const RANGES: &[(&str, &[&str], &[&str], &str)] = &[
    ("scheduler.output_tpot_budget_ms", &["0.001", "1", "1e30"], &["0", "-1", "nan", "1e-60"], "must be above 0"),
    ("scheduler.think_tpot_budget_ms", &["0.001"], &["0.0", "-0.5"], "must be above 0"),
    ("scheduler.think_batch_multiplier", &["1", "1e6"], &["0.99", "1000001"], "must be in [1, 1000000]"),
    ("scheduler.min_think_tokens", &["0", "16777216"], &["-1", "16777217"], "must be in 0..=16777216"),
    ("scheduler.max_think_tokens", &["1", "16777216"], &["0", "16777217"], "must be in 1..=16777216"),
    ("scheduler.max_defer_ms", &["1e-3"], &["0"], "must be above 0"),
    ("scheduler.session_wait_ms", &["0", "86400000"], &["-1", "86500000"], "must be in [0, 86400000]"),
    ("scheduler.answer_reserve_tokens", &["0", "16777216"], &["-1", "16777217"], "must be in 0..=16777216"),
    ("model.stop_strings", &["'answer'"], &["'thinking'"], "must be \"everywhere\" or \"answer\""),
    ("model.tool_call_ends_thinking", &["true", "false"], &["'yes'"], "must be \"auto\", true or false"),
    ("scheduler.thinking", &["'guarded'"], &["'off'"], "must be \"stock\" or \"guarded\""),
    ("model.min_answer_tokens", &["0", "65536"], &["-1", "65537"], "must be in 0..=65536"),
    ("entropy.ema_alpha", &["1e-9", "1", "1.0"], &["0", "1.0000001", "2", "nan"], "must be in (0, 1]"),
    ("entropy.eat_variance_threshold", &["1e-9"], &["0"], "must be above 0"),
    ("entropy.eat_max_bits", &["1e-9"], &["0"], "must be above 0"),
    ("entropy.eat_probe_interval_tokens", &["1", "65536"], &["0", "65537"], "must be in 1..=65536"),
    ("entropy.min_probes", &["1", "65536"], &["0", "65537"], "must be in 1..=65536"),
    ("entropy.rpdi_window", &["1", "65536"], &["0", "65537"], "must be in 1..=65536"),
    ("entropy.rpdi_threshold", &["1e-9", "1e300", "inf"], &["0", "nan", "-inf"], "must be above 0, or inf"),
    ("entropy.probe_at", &["'newline'"], &["'line'"], "must be \"interval\" or \"newline\""),
    ("kv_memory.evict_dead_thinking", &["true", "false"], &["'yes'"], "must be \"auto\", true or false"),
    ("model.strips_reasoning", &["true", "false"], &["'yes'"], "must be \"auto\", true or false"),
    ("kv_memory.growth_blocks", &["0", "1024"], &["-0.5", "1025"], "must be in [0, 1024]"),
    (
        "disagg.fabric",
        &["'none'", "'tcp'", "'nixl'", "'mooncake'"],
        &["'rdma'"],
        "must be \"none\", \"tcp\", \"nixl\" or \"mooncake\"",
    ),
    ("disagg.offload_threshold_blocks", &["1", "65536"], &["0", "65537"], "must be in 1..=65536"),
    ("disagg.policy", &["'threshold'", "'expected-time'"], &["'always'"], "must be \"threshold\" or \"expected-time\""),
    ("policy.max_strikes", &["1", "1000"], &["0", "1001"], "must be in 1..=1000"),
    ("policy.strike_window_s", &["1", "86400"], &["0", "86401"], "must be in 1..=86400"),
    ("admin.audit_log_max_mib", &["1", "1024"], &["0", "1025"], "must be in 1..=1024"),
    ("policy.dispatch.deadline_ms", &["0.1", "1000"], &["0", "1000.1"], "must be in (0, 1000]"),
    ("policy.dispatch.memory_mib", &["1", "1024"], &["0", "1025"], "must be in 1..=1024"),
    ("policy.dispatch.mode", &["'active'", "'shadow'"], &["'off'"], "must be \"active\" or \"shadow\""),
    ("policy.eviction.deadline_ms", &["0.1", "1000"], &["0", "1000.1"], "must be in (0, 1000]"),
    ("policy.eviction.memory_mib", &["1", "1024"], &["0", "1025"], "must be in 1..=1024"),
    ("policy.eviction.mode", &["'shadow'"], &["'Active'"], "must be \"active\" or \"shadow\""),
    ("policy.budget.deadline_ms", &["0.1", "1000"], &["0", "1000.1"], "must be in (0, 1000]"),
    ("policy.budget.memory_mib", &["1", "1024"], &["0", "1025"], "must be in 1..=1024"),
    ("policy.budget.mode", &["'shadow'"], &["' shadow'"], "must be \"active\" or \"shadow\""),
    ("service_levels.NAME.ttfo_ms", &["0.001", "600000"], &["0", "-1", "nan"], "must be above 0"),
    ("service_levels.NAME.prompt_ms_per_token", &["0", "1e30"], &["-0.1"], "must be at least 0"),
    ("service_levels.NAME.think_ms_per_token", &["0", "1e30"], &["-0.1"], "must be at least 0"),
    ("service_levels.NAME.tpot_ms", &["0.001", "1e30"], &["0"], "must be above 0"),
    ("service_levels.NAME.least_share", &["0", "1"], &["-0.1", "1.1"], "must be in [0, 1]"),
    ("service_levels.NAME.weight", &["0.001", "1000"], &["0", "1000.1"], "must be in (0, 1000]"),
    (
        "service_levels.NAME.late",
        &["'last'", "'refuse'", "'serve'"],
        &["'first'"],
        "must be \"last\", \"refuse\" or \"serve\"",
    ),
    ("service_levels.NAME.longest_wait_ms", &["5000", "1e30"], &["0", "-1"], "must be above 0"),
];

/// Fields whose range is in words: (field, accepted, refused).
const IN_WORDS: &[(&str, &str, &str)] = &[
    ("scheduler.reasoning_effort.none.max_think_tokens", "32768", "16777217"),
    ("scheduler.reasoning_effort.none.min_think_tokens", "'unchanged'", "16777217"),
    ("scheduler.reasoning_effort.minimal.max_think_tokens", "32768", "16777217"),
    ("scheduler.reasoning_effort.minimal.min_think_tokens", "'unchanged'", "16777217"),
    ("scheduler.reasoning_effort.low.max_think_tokens", "32768", "16777217"),
    ("scheduler.reasoning_effort.low.min_think_tokens", "'unchanged'", "16777217"),
    ("scheduler.reasoning_effort.medium.max_think_tokens", "32768", "16777217"),
    ("scheduler.reasoning_effort.medium.min_think_tokens", "'unchanged'", "16777217"),
    ("scheduler.reasoning_effort.high.max_think_tokens", "32768", "16777217"),
    ("scheduler.reasoning_effort.high.min_think_tokens", "'unchanged'", "16777217"),
    ("scheduler.reasoning_effort.xhigh.max_think_tokens", "32768", "16777217"),
    ("scheduler.reasoning_effort.xhigh.min_think_tokens", "'unchanged'", "16777217"),
    ("scheduler.reasoning_effort.max.max_think_tokens", "32768", "16777217"),
    ("scheduler.reasoning_effort.max.min_think_tokens", "'unchanged'", "16777217"),
    ("policy.cache_dir", "'cache'", "\"\\u0000\""),
    ("policy.record_dir", "'recordings'", "\"\\u0000\""),
    ("policy.record_max_mib", "8", "7"),
    ("policy.trusted_keys", "['k']", "['']"),
    ("policy.dispatch.source", "'native:fcfs'", "'native:x'"),
    ("policy.dispatch.config", "{}", "{ a = 1 }"),
    ("policy.eviction.source", "'p.wasm'", "'native:x'"),
    ("policy.eviction.config", "{}", "{ a = nan }"),
    ("policy.budget.source", "'p.wasm'", "'native:x'"),
    ("policy.budget.config", "{}", "{ a = inf }"),
    ("telemetry.prometheus", "'0.0.0.0:1'", "'0.0.0.0'"),
    ("telemetry.tenants", "0", "257"),
    ("telemetry.otlp_endpoint", "'http://h:1'", "'h:1'"),
    ("telemetry.otlp_ca_file", "'ca.pem'", "\"\\u0000\""),
    ("telemetry.service_name", "'s'", "''"),
    ("admin.listen", "'unix:/s'", "'127.0.0.1:9464'"),
    ("admin.token_file", "'token'", "\"\\u0000\""),
    ("admin.tls_cert_file", "'cert.pem'", "\"\\u0000\""),
    ("admin.tls_key_file", "'key.pem'", "\"\\u0000\""),
    ("admin.audit_log", "'audit.jsonl'", "\"\\u0000\""),
    ("model.family", "'qwen3'", "'qwen4'"),
    ("model.think_start", "['<a>', '<b>']", "['']"),
    ("model.think_end", "'</a>'", "''"),
    ("model.tool_call", "['<tool_call>', '[TOOL_CALLS]']", "['']"),
    ("model.force_phrase", "'enough</think>'", "'enough'"),
    ("model.interrupt", "['Wait', 'Hmm']", "'</think>'"),
    ("entropy.probe_suffix", "'Final answer: '", "'</think>'"),
    ("service_levels.NAME.tenants", "['a', 'b']", "['a', 'a']"),
    ("service_levels.NAME.models", "['a']", "['']"),
    ("service_levels.NAME.priorities", "[-1, 3]", "[3, -1]"),
    ("service_levels.NAME.default", "true", "3"),
];

#[test]
fn every_range_in_words_is_checked() {
    for (path, accepted, refused) in IN_WORDS {
        let text = set(path, accepted);
        assert!(MeridianConfig::from_toml(&text).is_ok(), "{text}");
        assert!(refusal(&set(path, refused)).starts_with(path), "{path}");
        assert!(config::fields().iter().any(|field| field.path == *path && !field.range.is_empty()), "{path}");
    }
    let silent: Vec<_> = config::fields().iter().filter(|field| field.range.is_empty()).collect();
    assert!(silent.is_empty(), "{silent:?}");
}

#[test]
fn every_range_is_refused_on_both_sides() {
    for (path, accepted, refused, expectation) in RANGES {
        for value in *accepted {
            let text = set(path, value);
            assert!(MeridianConfig::from_toml(&text).is_ok(), "{text}");
        }
        for value in *refused {
            let message = refusal(&set(path, value));
            assert!(message.starts_with(&format!("{path}: ")), "{value}: {message}");
            assert!(message.ends_with(&format!(": {expectation}")), "{value}: {message}");
        }
    }
    let in_words = |path: &str| IN_WORDS.iter().any(|row| row.0 == path);
    let ranged = config::fields().iter().filter(|f| !f.range.is_empty() && f.kind != "boolean" && !in_words(&f.path));
    let ranged: Vec<_> = ranged.collect();
    for field in &ranged {
        assert!(RANGES.iter().any(|row| row.0 == field.path), "{}: its range is not tested", field.path);
        assert_eq!(RANGES.iter().find(|row| row.0 == field.path).unwrap().3, format!("must be {}", field.range));
    }
    assert_eq!(ranged.len(), RANGES.len());
    assert_eq!(refusal("[entropy]\nema_alpha = inf"), "entropy.ema_alpha: inf: must be finite in 32 bits");
    assert_eq!(refusal("[scheduler]\nmax_defer_ms = 1e39"), "scheduler.max_defer_ms: 1e39: must be finite in 32 bits");
}

#[test]
fn mistakes_name_field_value_and_expectation() {
    assert_eq!(refusal("[scheduler]\nmax_defer_ms = -1"), "scheduler.max_defer_ms: -1: must be above 0");
    assert_eq!(
        refusal("[scheduler]\noutput_tpot_budget_ms = nan"),
        "scheduler.output_tpot_budget_ms: NaN: must be above 0"
    );
    assert_eq!(refusal("[policy.dispatch]\nmemory_mib = 0"), "policy.dispatch.memory_mib: 0: must be in 1..=1024");
    assert_eq!(refusal("scheduler = 3"), "scheduler: invalid type: integer, expected a table");
    assert!(refusal("[scheduler]\nmax_defer_ms = 'soon'").starts_with("scheduler.max_defer_ms: invalid type"));
    assert!(refusal("[scheduler]\nmax_defer_ms = [1]").starts_with("scheduler.max_defer_ms: invalid type"));
    assert!(refusal("[scheduler]\nmin_think_tokens = 1.5").starts_with("scheduler.min_think_tokens: invalid type"));
    assert!(refusal("[scheduler]\nmax_defer_ms = = 1").starts_with("line 2, column 16: "));
    assert_eq!(
        refusal("[kv_memory]\nevict_dead_thinking = 1"),
        "kv_memory.evict_dead_thinking: invalid type: integer `1`, expected \"auto\", true or false"
    );
}

#[test]
fn unknown_fields_are_refused_with_a_suggestion() {
    for (text, expected) in [
        ("[polcy.dispatch]\n", "polcy: unknown field, did you mean `policy`?"),
        (
            "[policy.dispatch]\nsorce = 'x'",
            "policy.dispatch.sorce: unknown field, did you mean `policy.dispatch.source`?",
        ),
        ("[policy.budget]\nmod = 'x'", "policy.budget.mod: unknown field, did you mean `policy.budget.mode`?"),
        ("zzzzzzzzzzzz = 1", "zzzzzzzzzzzz: unknown field"),
        ("x = 1", "x: unknown field"),
        // In the wrong table, or in none.
        ("[scheduler]\nema_alpha = 1", "scheduler.ema_alpha: unknown field, did you mean `entropy.ema_alpha`?"),
        ("token_file = 'x'", "token_file: unknown field, did you mean `admin.token_file`?"),
        ("\"a\\nb\" = 1", "\"a\\nb\": unknown field"),
        (
            "[scheduler.max_defer_ms]\nx = 1",
            "scheduler.max_defer_ms.x: unknown field, did you mean `scheduler.max_defer_ms`?",
        ),
    ] {
        assert_eq!(refusal(text), expected, "{text}");
    }
}

#[test]
fn fields_that_depend_on_each_other() {
    for (text, expected) in [
        (
            "[scheduler]\nmin_think_tokens = 10\nmax_think_tokens = 9",
            "scheduler.min_think_tokens: 10: must be at most scheduler.max_think_tokens, 9",
        ),
        ("[model]\nthink_end = ''", "model.think_end: \"\": must be set exactly when model.think_start is"),
        ("[model]\nthink_end = '<think>'", "model.think_end: \"<think>\": must differ from model.think_start"),
        (
            "[model]\nthink_end = '</think>'\nforce_phrase = 'enough'",
            "model.force_phrase: \"enough\": must contain a text of model.think_end, or thinking would go on",
        ),
        (
            "[admin]\nlisten = '127.0.0.1:9464'",
            "admin.listen: \"127.0.0.1:9464\": must differ from telemetry.prometheus, \"127.0.0.1:9464\", at every rank",
        ),
        (
            "[policy.budget]\nsource = 'native:'",
            "policy.budget.source: \"native:\": must be native:NAME, a path or oci://HOST/NAME@sha256:DIGEST",
        ),
        (
            "[policy.eviction]\nsource = ''",
            "policy.eviction.source: \"\": must be native:NAME, a path or oci://HOST/NAME@sha256:DIGEST",
        ),
        ("[policy]\ntrusted_keys = ['k', ' ']", "policy.trusted_keys: \"\": must not hold an empty key"),
        (
            "[telemetry]\notlp_endpoint = 'collector:4317'",
            "telemetry.otlp_endpoint: \"collector:4317\": must be an http:// or https:// URL, or empty",
        ),
        (
            "[telemetry]\notlp_endpoint = 'http://localhost:99999'",
            "telemetry.otlp_endpoint: \"http://localhost:99999\": must be an http:// or https:// URL, or empty: invalid port number",
        ),
        (
            "[telemetry]\notlp_endpoint = 'http://[::1'",
            "telemetry.otlp_endpoint: \"http://[::1\": must be an http:// or https:// URL, or empty: invalid IPv6 address",
        ),
        (
            "[telemetry]\notlp_endpoint = 'http://h:0/v1'",
            "telemetry.otlp_endpoint: \"http://h:0/v1\": must have a port in 1..=65535",
        ),
        (
            "[telemetry]\notlp_endpoint = 'http:///v1'",
            "telemetry.otlp_endpoint: \"http:///v1\": must be an http:// or https:// URL, or empty: empty host",
        ),
        ("[telemetry]\nservice_name = ' '", "telemetry.service_name: \" \": must not be empty"),
    ] {
        assert_eq!(refusal(text), expected, "{text}");
    }
    let config =
        parse("[telemetry]\nprometheus = ''\notlp_endpoint = 'http://[::1]:4317'\n[admin]\nlisten = '127.0.0.1:0'");
    assert_eq!(Listen::parse(&config.telemetry.prometheus), Ok(Listen::Off));
    parse("[admin]\nlisten = '127.0.0.1:0'\n[telemetry]\nprometheus = '127.0.0.1:0'");
}

#[test]
fn addresses() {
    let loopback = "must be a loopback address such as 127.0.0.1 or [::1]: other machines must not reach it";
    for (text, expected) in [
        ("", Ok(Listen::Off)),
        ("127.0.0.1:1", Ok(Listen::Tcp("127.0.0.1:1".parse().unwrap()))),
        ("127.8.9.10:1", Ok(Listen::Tcp("127.8.9.10:1".parse().unwrap()))),
        ("[::1]:65535", Ok(Listen::Tcp("[::1]:65535".parse().unwrap()))),
        ("[::ffff:127.0.0.1]:1", Ok(Listen::Tcp("[::ffff:127.0.0.1]:1".parse().unwrap()))),
        ("unix:/run/m.sock", Ok(Listen::Unix("/run/m.sock".into()))),
        ("unix:", Err("must be unix:PATH with a path of 1 to 107 bytes")),
        ("0.0.0.0:9465", Err(loopback)),
        ("10.0.0.1:9465", Err(loopback)),
        ("[::]:9465", Err(loopback)),
        ("[::ffff:10.0.0.1]:1", Err(loopback)),
        ("localhost:9465", Err("must be IP:port, unix:PATH or empty")),
        ("127.0.0.1", Err("must be IP:port, unix:PATH or empty")),
        ("127.0.0.1:65536", Err("must be IP:port, unix:PATH or empty")),
    ] {
        assert_eq!(Listen::parse(text), expected, "{text}");
    }
    let long = format!("unix:/{}", "x".repeat(107));
    assert!(Listen::parse(&long).is_err() && Listen::parse(&long[..long.len() - 1]).is_ok());
    parse("[telemetry]\nprometheus = '0.0.0.0:9466+{rank}'");
    parse("[telemetry]\nprometheus = '0.0.0.0:9464+{rank}'\n[admin]\nlisten = '127.0.0.1:9564+{rank}'");
    for metrics in ["0.0.0.0:9465", "[::]:9465", "[::ffff:127.0.0.1]:9465", "0.0.0.0:9464+{rank}"] {
        let taken = refusal(&format!("[telemetry]\nprometheus = '{metrics}'"));
        let expected = format!("must differ from telemetry.prometheus, \"{metrics}\", at every rank");
        assert_eq!(taken, format!("admin.listen: \"127.0.0.1:9465\": {expected}"));
    }
    assert_eq!(
        refusal("[telemetry]\nprometheus = 'x'"),
        "telemetry.prometheus: \"x\": must be IP:port, unix:PATH or empty"
    );
}

/// Other machines reach the admin interface only over TLS and with a token.
#[test]
fn beyond_loopback_the_admin_interface_has_tls_and_a_token() {
    let tls = "tls_cert_file = 'c'\ntls_key_file = 'k'\n";
    let listen = |address: &str, rest: &str| format!("[admin]\nlisten = '{address}'\n{rest}");
    for address in ["0.0.0.0:9465", "10.0.0.7:9465", "[::]:9465", "10.0.0.7:9465+{rank}"] {
        parse(&listen(address, &format!("{tls}token_file = 't'")));
        for lacking in ["", tls, "token_file = 't'"] {
            assert_eq!(
                refusal(&listen(address, lacking)),
                format!(
                    "admin.listen: \"{address}\": must be a loopback address such as 127.0.0.1 or [::1], or have \
                     admin.tls_cert_file, admin.tls_key_file and admin.token_file"
                )
            );
        }
    }
    parse(&listen("127.0.0.1:9465+{rank}", ""));
    parse(&listen("unix:/run/m-{rank}.sock", ""));
    for odd in ["127.0.0.1:65535+{rank}x", "127.0.0.1:x+{rank}", "127.0.0.1+{rank}", "{rank}:1"] {
        assert!(refusal(&listen(odd, "")).ends_with("must be IP:port, unix:PATH or empty"), "{odd}");
    }
    for one in ["tls_cert_file = 'c'", "tls_key_file = 'k'"] {
        assert!(
            refusal(&format!("[admin]\n{one}")).ends_with("must be set exactly when admin.tls_cert_file is"),
            "{one}"
        );
    }
    assert_eq!(Listen::of_rank("127.0.0.1:65535+{rank}", 1), "127.0.0.1:65535+{rank}", "no such port");
}

#[test]
fn markers_are_one_text_or_alternatives() {
    let model = parse("[model]\nthink_start = ['<a>', '<b>']\nthink_end = '</a>'").model;
    assert_eq!(model.think_start.as_slice(), ["<a>", "<b>"]);
    assert_eq!(model.think_end.as_slice(), ["</a>"]);
    let none = parse("[model]\nthink_start = []\nthink_end = ''").model;
    assert!(none.think_start.is_empty() && none.think_end.is_empty());
    assert_eq!(serde_json::to_string(&none.think_start).unwrap(), "\"\"");
    assert_eq!(serde_json::to_string(&model.think_start).unwrap(), "[\"<a>\",\"<b>\"]");
    assert!(refusal("[model]\nthink_start = ['']").starts_with("model.think_start: "));
    assert!(refusal("[model]\nthink_start = 7").ends_with("expected a string or a list of strings"));
    let many = format!("[model]\nthink_start = {:?}", (0..9).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(refusal(&many), "model.think_start: expected at most 8 alternatives");
    let long = format!("[model]\nthink_start = '{}'", "x".repeat(257));
    assert_eq!(refusal(&long), "model.think_start: expected every alternative of 1 to 256 bytes");
}

#[test]
fn tool_calls_are_texts_apart_from_the_markers_of_thinking() {
    assert!(MeridianConfig::default().model.tool_call.is_empty());
    assert_eq!(parse("[model]\ntool_call = '<c>'").model.tool_call.as_slice(), ["<c>"]);
    assert_eq!(parse("[model]\nfamily = 'qwen3'").model.tool_call.as_slice(), ["<tool_call>"]);
    assert!(parse("[model]\nfamily = 'qwen3'\ntool_call = []").model.tool_call.is_empty());
    let long = format!("[model]\ntool_call = '{}'", "x".repeat(257));
    assert_eq!(refusal(&long), "model.tool_call: expected every alternative of 1 to 256 bytes");
    for marker in ["<think>", "</think>"] {
        assert_eq!(
            refusal(&format!("[model]\ntool_call = ['<c>', '{marker}']")),
            format!("model.tool_call: [\"<c>\", \"{marker}\"]: must differ from model.think_start and model.think_end")
        );
    }
}

#[test]
fn a_family_supplies_what_the_file_does_not_set() {
    let parsed = MeridianConfig::parse("[model]\nfamily = 'gpt-oss'\nstrips_reasoning = false").unwrap();
    let model = &parsed.config.model;
    assert_eq!(model.think_start.as_slice(), ["<|channel|>analysis<|message|>"]);
    assert_eq!(model.strips_reasoning, Auto::Set(false));
    assert!(!model.strips_reasoning_or_keep());
    let origin = |path: &str| parsed.fields.iter().find(|field| field.path == path).unwrap().origin.to_string();
    assert_eq!(origin("model.family"), "file");
    assert_eq!(origin("model.strips_reasoning"), "file");
    assert_eq!(origin("model.think_start"), "family:gpt-oss");
    assert_eq!(origin("scheduler.max_defer_ms"), "default");
    let kept = parse("[model]\nfamily = 'granite'\nthink_start = '<t>'\nthink_end = '</t>'").model;
    assert_eq!((kept.think_start.as_slice(), kept.think_end.as_slice()), (&["<t>".into()][..], &["</t>".into()][..]));
    let message = refusal("[model]\nfamily = 'qwen4'");
    assert!(
        message.starts_with("model.family: \"qwen4\": unknown model family, did you mean \"qwen3\", expected one of "),
        "{message}"
    );
}

#[test]
fn fields_of_a_later_version_are_refused_as_such() {
    for field in ["kv_memory.block_size_bytes", "kv_memory.capacity_bytes", "kv_memory.think_fraction_limit"] {
        assert_eq!(refusal(&format!("{field} = 1")), format!("{field}: not in this version, expected no such field"));
    }
    assert!(refusal("[disaggx]\na = 1").starts_with("disaggx: unknown field"));
}

#[test]
fn blocks_move_over_a_fabric_that_exists() {
    assert_eq!(
        refusal("[disagg]\nenabled = true"),
        "disagg.fabric: \"none\": must be \"tcp\", \"nixl\" or \"mooncake\" when disagg.enabled is true"
    );
    assert!(refusal("[disagg]\nfabric = 'infiniband'").starts_with("disagg.fabric: "));
    assert!(refusal("[disagg]\noffload_threshold_blocks = 0").starts_with("disagg.offload_threshold_blocks: 0: "));
    let config = parse("[disagg]\nenabled = true\nfabric = 'nixl'\noffload_threshold_blocks = 9");
    assert_eq!((config.disagg.enabled, config.disagg.offload_threshold_blocks), (true, 9));
    assert!(!parse("[disagg]\nfabric = 'tcp'").disagg.enabled);
}

#[test]
fn probes_that_tell_nothing_are_warned_of() {
    let warnings = |text: &str| MeridianConfig::parse(text).unwrap().warnings();
    let [warning] = &warnings("[entropy]\neat_max_bits = 0.4")[..] else { panic!("one warning") };
    assert!(warning.starts_with("entropy.probe_suffix: \"\": nothing is probed without it, so EAT ends no thinking;"));
    assert_eq!(warnings("[policy.budget]\nsource = 'native:deer'").len(), 1);
    for text in [
        "",
        "[entropy]\neat_max_bits = 0.4\nprobe_suffix = 'Final answer: '",
        "[entropy]\neat_max_bits = 0.4\nenabled = false",
        "[model]\nthink_start = ''\nthink_end = ''",
        "[policy.budget]\nsource = 'native:fixed-budget'",
        "[policy.dispatch]\nsource = 'native:fcfs'",
    ] {
        assert_eq!(warnings(text), [""; 0], "{text}");
    }
}

#[test]
fn settings_that_no_engine_of_vllm_uses_are_warned_of() {
    let warnings = |text: &str| MeridianConfig::parse(text).unwrap().warnings();
    let [warning] = &warnings("[disagg]\nenabled = true\nfabric = 'tcp'")[..] else { panic!("one warning") };
    assert!(warning.starts_with("disagg.enabled: true: "), "{warning}");
    let budget = "[policy.budget]\nsource = 'native:fixed-budget'\nmode = 'shadow'\n";
    assert_eq!(warnings(budget), [""; 0]);
    let eviction = "[policy.eviction]\nsource = 'native:ttl'\nmode = 'shadow'\n";
    for stock in ["source = 'native:fcfs'", "mode = 'shadow'"] {
        let both = warnings(&format!("{budget}{eviction}[policy.dispatch]\n{stock}"));
        let [of_eviction, of_budget] = &both[..] else { panic!("two warnings: {both:?}") };
        assert!(of_eviction.starts_with("policy.eviction.mode: \"shadow\": it is not asked"), "{of_eviction}");
        assert!(of_budget.starts_with("policy.budget.mode: \"shadow\": it is not asked"), "{of_budget}");
        let guarded = format!("{budget}[policy.dispatch]\n{stock}\n[scheduler]\nthinking = 'guarded'");
        assert_eq!(warnings(&guarded), [""; 0], "the engine is not stock");
    }
}

#[test]
fn beside_a_shadow_the_defaults_of_the_other_slots_decide() {
    assert_eq!(SlotConfig::eviction().source, Eviction::BESIDE_SHADOW);
    assert_eq!(SlotConfig::budget().source, Budget::BESIDE_SHADOW);
}

#[test]
fn numbers_and_choices_that_do_not_fit_name_their_field() {
    let long = "9".repeat(100);
    for (text, expected) in [
        (
            "[scheduler]\nmax_think_tokens = 99999999999999999999",
            "scheduler.max_think_tokens: 99999999999999999999: must fit a signed integer of 64 bits".to_owned(),
        ),
        ("scheduler.max_think_tokens = -0xffffffffffffffffff", "line 1, column 30: ".to_owned()),
        (
            "scheduler.max_think_tokens = 0xffffffffffffffffff",
            "scheduler.max_think_tokens: 0xffffffffffffffffff: must fit".into(),
        ),
        ("[scheduler]\nmax_defer_ms = 1e999", "scheduler.max_defer_ms: 1e999: must fit a number of 64 bits".into()),
        (
            "[policy.dispatch.config]\na = [1, { b = 1e999 }]",
            "policy.dispatch.config.a[1].b: 1e999: must fit a number".into(),
        ),
        (&format!("[entropy]\nrpdi_window = {long}"), format!("entropy.rpdi_window: {}...: must fit", &long[..40])),
        ("a = 1_7-0\u{15}-2", "a: 17-0\\u{15}-2: must fit a signed integer".into()),
        (&format!("a = 1_7{}-1", "é".repeat(50)), format!("a: 17{}...: must fit a signed integer", "é".repeat(38))),
        ("[entropy]\nprobe_at = 1", "entropy.probe_at: 1: must be \"interval\" or \"newline\"".into()),
        ("[policy.budget]\nmode = []", "policy.budget.mode: []: must be \"active\" or \"shadow\"".into()),
    ] {
        let found = refusal(text);
        assert!(found.starts_with(&expected), "{text}: {found}");
    }
}

#[test]
fn policy_options_are_the_policys_own() {
    for slot in ["dispatch", "eviction", "budget"] {
        let text =
            format!("[policy.{slot}]\nsource = 'p.wasm'\nconfig = {{ anything = {{ goes = 1, mode = 'off' }} }}");
        let json = serde_json::to_value(parse(&text)).unwrap();
        assert_eq!(json["policy"][slot]["config"]["anything"]["goes"], 1);
    }
}

#[test]
fn what_the_engine_would_refuse_is_refused() {
    let unpinned = "must end in @sha256:DIGEST, or in :TAG where a tag will do";
    let tagged = "must end in @sha256:DIGEST, because a tag may name other bytes tomorrow (`meridian policy pull` prints the \
                  digest)";
    for (text, expected) in [
        (
            "[policy.dispatch]\nsource = 'native:nope'",
            "policy.dispatch.source: \"native:nope\": unknown native policy, expected one of native:balanced, native:output-first, \
             native:fcfs, native:noop, native:priority, native:pascal, native:srpt, native:fair-share, native:edf, \
             native:qoe, native:mlfq, native:qoserve, native:scorpio, native:jitserve, native:lpm"
                .to_owned(),
        ),
        (
            "[policy.eviction]\nsource = 'native:fcfs'",
            "policy.eviction.source: \"native:fcfs\": unknown native policy, expected one of native:tiered-lru, \
             native:lru, native:prefix-value, native:t-lru, native:ttl, native:wa-lru, \
             native:cost-aware, native:next-use, native:noop"
                .into(),
        ),
        (
            "[policy.budget]\nsource = 'native:tiered-lru'",
            "policy.budget.source: \"native:tiered-lru\": unknown native policy, expected one of native:eat-rpdi, \
             native:fixed-budget, native:patience, native:deadline-aware, native:eat, native:rpdi, native:deer, \
             native:code-stop, native:noop"
                .into(),
        ),
        (
            "[policy.budget]\nsource = 'native:patience'\n[policy.budget.config]\nanswers = 0",
            "policy.budget.config: { \"answers\" = 0 }: native:patience refused it: answers: 0: must be in 1..=16777216"
                .into(),
        ),
        (
            "[policy.eviction]\nsource = 'native:prefix-value'\n[policy.eviction.config]\ncap = 0",
            "policy.eviction.config: { \"cap\" = 0 }: native:prefix-value refused it: cap: 0: must be in 1..=255"
                .into(),
        ),
        ("[policy.dispatch]\nsource = 'oci://x/y'", format!("policy.dispatch.source: \"oci://x/y\": {unpinned}")),
        ("[policy.eviction]\nsource = 'oci://x/y:1'", format!("policy.eviction.source: \"oci://x/y:1\": {tagged}")),
        (
            "[policy.budget]\nsource = 'oci://'",
            "policy.budget.source: \"oci://\": must be oci://HOST/NAME@sha256:DIGEST".into(),
        ),
        (
            "[policy.budget]\nsource = 'oci://ann:geheim@x/y:1'",
            "policy.budget.source: \"oci://...@x/y:1\": must have a host name, perhaps with a port, behind oci://, and no \
             user name"
                .into(),
        ),
        (
            "[policy.dispatch.config]\nx = 1",
            "policy.dispatch.config: { \"x\" = 1 }: native:balanced refused it: config: this policy takes no \
             options"
                .into(),
        ),
        (
            "[policy.dispatch]\nsource = 'native:fcfs'\nconfig = { x = 1 }",
            "policy.dispatch.config: { \"x\" = 1 }: native:fcfs refused it: config: this policy takes no options"
                .into(),
        ),
        ("[policy]\ncache_dir = \"a\\u0000\"", "policy.cache_dir: \"a\\0\": must be a path or empty".into()),
    ] {
        assert_eq!(refusal(text), expected, "{text}");
    }
}

#[test]
fn options_that_json_cannot_hold_are_refused_with_their_path() {
    for slot in ["dispatch", "eviction", "budget"] {
        let set = |options: &str| refusal(&format!("[policy.{slot}]\nsource = 'p.wasm'\nconfig = {options}"));
        assert_eq!(set("{ x = nan }"), format!("policy.{slot}.config.x: NaN: must be finite"));
        assert_eq!(set("{ a = [1, { b = -inf }] }"), format!("policy.{slot}.config.a[1].b: -inf: must be finite"));
        assert_eq!(
            set("{ \"a b\" = 1979-05-27 }"),
            format!("policy.{slot}.config.\"a b\": 1979-05-27: must not be a date, write it as a string")
        );
    }
    let mut config = MeridianConfig::default();
    config.policy.budget.config.insert("x".into(), f64::NAN.into());
    assert_eq!(config.validate().unwrap_err().to_string(), "policy.budget.config.x: NaN: must be finite");
}

#[test]
fn a_configuration_made_by_hand_is_checked_as_well() {
    let mut config = MeridianConfig::default();
    config.scheduler.max_defer_ms = f32::NAN;
    assert_eq!(config.validate().unwrap_err().to_string(), "scheduler.max_defer_ms: NaN: must be above 0");
    config = MeridianConfig::default();
    config.model.family = "none".into();
    assert!(config.validate().is_err());
    let json = serde_json::to_string(&parse("[kv_memory]\ngrowth_blocks = 3\nevict_dead_thinking = false")).unwrap();
    let back = MeridianConfig::from_json(&json).unwrap();
    assert_eq!(back.kv_memory.growth_blocks, 3.0);
    assert_eq!(back.kv_memory.evict_dead_thinking, Auto::Set(false));
    let off = parse("[entropy]\nrpdi_threshold = inf");
    assert_eq!(off.validate(), Ok(()));
    assert_eq!(MeridianConfig::from_json(&serde_json::to_string(&off).unwrap()).unwrap(), off);
    assert_eq!(MeridianConfig::from_json(r#"{"entropy": {"rpdi_threshold": "Infinity"}}"#).unwrap(), off);
}

#[test]
fn mistakes_in_json_name_the_dotted_field() {
    for (json, expected) in [
        (r#"{"scheduler":{"max_defer_ms":"x"}}"#, "scheduler.max_defer_ms: invalid type: string \"x\", expected f32"),
        (r#"{"scheduler":{"max_defer_ms":"NaN"}}"#, "scheduler.max_defer_ms: NaN: must be above 0"),
        (r#"{"scheduler":{"max_defer_ms":"-Infinity"}}"#, "scheduler.max_defer_ms: -inf: must be finite in 32 bits"),
        (r#"{"entropy":{"ema_alpha":"Infinity"}}"#, "entropy.ema_alpha: inf: must be finite in 32 bits"),
        (r#"{"scheduler":{"max_defer_ms":null}}"#, "scheduler.max_defer_ms: invalid type: null, expected a value"),
        (r#"{"scheduler":{"max_defer_ms":1e999}}"#, "scheduler.max_defer_ms: number out of range"),
        (
            r#"{"scheduler":{"max_think_tokens":true}}"#,
            "scheduler.max_think_tokens: invalid type: boolean `true`, expected u32",
        ),
        (
            r#"{"kv_memory":{"growth_blocks":9223372036854775808}}"#,
            "kv_memory.growth_blocks: 9223372036854775808: must fit",
        ),
        (
            r#"{"policy":{"dispatch":{"source":1}}}"#,
            "policy.dispatch.source: invalid type: integer `1`, expected a string",
        ),
        (
            r#"{"policy":{"budget":{"config":{"a":[{"b c":null}]}}}}"#,
            "policy.budget.config.a[0].\"b c\": invalid type: null",
        ),
        (r#"{"policy":{"trusted_keys":["\ud800"]}}"#, "policy.trusted_keys[0]: "),
        (r#"{"model":{"think_start":[1]}}"#, "model.think_start"),
        (
            r#"{"scheduler":{"max_defer":1}}"#,
            "scheduler.max_defer: unknown field, did you mean `scheduler.max_defer_ms`?",
        ),
        ("[]", "configuration: invalid type: array, expected a table"),
        ("{} x", "line 1, column 4: trailing characters"),
        ("{", "line 1, column 1: EOF"),
    ] {
        let message = MeridianConfig::from_json(json).expect_err("the text is wrong").to_string();
        assert!(message.starts_with(expected), "{json}: {message}");
        assert!(!message.contains(char::is_control) && !message.contains("column 1 at"), "{message}");
    }
    let named = MeridianConfig::from_json(r#"{"telemetry":{"service_name":"NaN"}}"#).unwrap();
    assert_eq!(named.telemetry.service_name, "NaN");
    assert!(MeridianConfig::from_json(&format!("{{\"a\":{}", "[".repeat(200_000))).is_err());
    assert_eq!(MeridianConfig::from_json("{}").unwrap(), MeridianConfig::default());
}

#[test]
fn the_schema_says_what_the_parser_does() {
    let schema = config::schema();
    assert_eq!(schema["additionalProperties"], false);
    let alpha = &schema["properties"]["entropy"]["properties"]["ema_alpha"];
    assert_eq!((&alpha["exclusiveMinimum"], &alpha["maximum"], &alpha["default"]), (&0.into(), &1.into(), &0.1.into()));
    let budget = &schema["properties"]["policy"]["properties"]["budget"]["properties"];
    assert_eq!(budget["deadline_ms"]["default"], 5.0);
    assert!(budget["config"].get("properties").is_none());
    assert!(!schema.to_string().contains("\"$ref\""));
    assert!(!schema.to_string().contains("```"), "examples are for the reader of the code");
}

#[test]
fn depth_is_no_danger() {
    let deep = format!("{} = 1", vec!["a"; 200_000].join("."));
    refusal(&deep);
    refusal(&format!("a = {}", "[".repeat(200_000)));
    refusal(&format!("a = {}", "{a=".repeat(100_000)));
    let options = format!("[policy.dispatch]\nconfig.{} = 1", vec!["a"; 100_000].join("."));
    let _ = MeridianConfig::from_toml(&options);
}

#[test]
fn inline_values_are_toml() {
    let text = "a = \"\\u007f\\n\\\"\\\\ \\u0001é\"\nb = [1, 2.0, nan, { \"x y\" = true, z = [] }]\nc = 1979-05-27T07:32:00Z\nd = {}\n";
    let table: toml::Table = toml::from_str(text).unwrap();
    let lines: Vec<_> = table.iter().map(|(key, value)| format!("{key} = {}", config::inline(value))).collect();
    assert!(lines.iter().all(|line| !line.contains(char::is_control)), "{lines:?}");
    assert_eq!(lines.len(), 4);
    // NaN is not equal to itself.
    let again: toml::Table = toml::from_str(&lines.join("\n")).unwrap();
    assert_eq!(format!("{again:?}"), format!("{table:?}"));
}

#[test]
fn a_refusal_is_short_whatever_the_file_holds() {
    let long = "x".repeat(300_000);
    let texts = [
        format!("[admin]\nlisten = '{long}'"),
        format!("[admin]\n{long} = 1"),
        format!("[scheduler]\nmax_defer_ms = '{long}'"),
        format!("[model]\nfamily = '{long}'"),
        format!("[policy.dispatch]\nsource = 'native:{long}'"),
        format!("[policy.dispatch]\nsource = '{long}'"),
        format!("[policy.dispatch]\nsource = 'oci://{long}'"),
        format!("[policy.dispatch]\nconfig = {{ a = nan, b = '{long}' }}"),
        format!("[telemetry]\notlp_endpoint = '{long}'"),
        format!("[service_levels.{long}]\nttfo_ms = 0"),
        format!("[kv_memory]\nevict_dead_thinking = '{long}'"),
    ];
    for text in texts {
        let refused = refusal(&text);
        assert!(refused.len() < 5_000, "{} bytes: {}", refused.len(), &refused[..200]);
    }
    let refused = refusal(&format!("[admin]\nlisten = '{long}'"));
    assert!(
        refused.starts_with("admin.listen: \"xxx") && refused.contains("xxx... (300002 bytes): must be"),
        "{refused}"
    );
}

#[test]
fn service_levels_are_named_by_the_file_and_apart() {
    let of = |text: &str| MeridianConfig::parse(&format!("[service_levels]\n{text}"));
    let parsed = of("chat = { ttfo_ms = 3000 }\nbatch = { priorities = [1, 5] }").unwrap();
    let effective = |path: &str| parsed.fields.iter().find(|field| field.path == path).unwrap();
    assert_eq!(effective("service_levels.chat.ttfo_ms").origin, Origin::File);
    assert_eq!(effective("service_levels.batch.ttfo_ms").origin, Origin::Default);
    assert!(parsed.fields.iter().all(|field| !field.path.contains("NAME")));
    for (text, refusal) in [
        ("a = { ttfo = 1 }", "service_levels.a.ttfo: unknown field, did you mean `service_levels.a.ttfo_ms`?"),
        ("a = 3", "service_levels.a: invalid type: integer, expected a table"),
        ("'a b' = {}", "service_levels.\"a b\": a b: must be named by 1 to 64 of A-Z, a-z, 0-9, _ and -"),
        ("a = { longest_wait_ms = 10 }", "service_levels.a.longest_wait_ms: 10: must be at least its ttfo_ms, 5000"),
        (
            "a = { tenants = ['x'] }\nb = { tenants = ['x'] }",
            "service_levels.b.tenants: \"x\": must be names of at most 128 characters, each in one level only",
        ),
        (
            "\"a\\nb\\u001b[2J\" = {}",
            "service_levels.\"a\\nb\\u{1b}[2J\": a\\u{a}b\\u{1b}[2J: must be named by 1 to 64 of A-Z, a-z, 0-9, _ and -",
        ),
        (
            "a = { priorities = [0, 4] }\nb = { priorities = [4, 5] }",
            "service_levels.b.priorities: [4, 5]: must be apart from those of other levels",
        ),
        (
            "a = { default = true }\nb = { default = true }",
            "service_levels.b.default: true: must be true in one level at most, and a has it",
        ),
    ] {
        assert_eq!(of(text).unwrap_err().to_string(), refusal);
    }
    for (length, is_name) in [(0, false), (1, true), (128, true), (129, false)] {
        let text = format!("a = {{ tenants = ['{}'] }}", "é".repeat(length));
        assert_eq!(of(&text).is_ok(), is_name, "{length} characters are the most of a request's tenant");
    }
}

/// Text that is often nearly right.
fn toml_like() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        proptest::sample::select(config::fields()).prop_map(|field| field.path),
        "[a-z_.\"]{0,12}",
        any::<String>(),
    ];
    let value = prop_oneof![
        any::<i64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_map(|number| format!("{number:e}")),
        any::<String>().prop_map(|text| format!("{text:?}")),
        Just("'auto'".to_owned()),
        Just("[]".to_owned()),
        Just("['a', 'b']".to_owned()),
        Just("{ a = 1 }".to_owned()),
        Just("true".to_owned()),
        Just("nan".to_owned()),
        any::<String>(),
    ];
    let line = (name, value).prop_map(|(name, value)| format!("{name} = {value}\n"));
    proptest::collection::vec(line, 0..4).prop_map(|lines| lines.concat())
}

proptest! {
    #[test]
    fn any_text_is_taken_or_refused_in_one_line(text in prop_oneof![any::<String>(), toml_like()]) {
        match MeridianConfig::from_toml(&text) {
            Ok(config) => {
                prop_assert_eq!(config.validate(), Ok(()));
                let json = serde_json::to_string(&config).unwrap();
                prop_assert_eq!(MeridianConfig::from_json(&json).unwrap(), config);
            }
            Err(error) => {
                let message = error.to_string();
                prop_assert!(!message.is_empty() && !message.contains(['\n', '\r']), "{:?}", message);
            }
        }
    }
}

#[test]
fn nothing_set_changes_no_output_and_a_switch_sets_a_sensible_whole() {
    assert_eq!(parse("").outputs(), "as vLLM");
    assert!(parse("").leaves_memory_and_thinking());
    let guarded = MeridianConfig::parse("[scheduler]\nthinking = 'guarded'\nanswer_reserve_tokens = 8").unwrap();
    assert_eq!(
        guarded.config.outputs(),
        "thinking ends at 32,768 tokens; loops end; an end of sequence inside the thinking ends the thinking instead; \
         answers of requests with a budget have at least 1 tokens; thinking with a budget leaves 8 tokens for the \
         answer; thinking ends when it strays (RPDI above 2)"
    );
    let origin = |path: &str| guarded.fields.iter().find(|field| field.path == path).unwrap().origin.to_string();
    assert_eq!(
        (origin("scheduler.end_loops"), origin("scheduler.answer_reserve_tokens")),
        ("guarded".into(), "file".into())
    );
    // Every field that could, by itself.
    for (text, outputs) in [
        ("[scheduler]\nmax_think_tokens = 600", "thinking ends at 600 tokens"),
        ("[scheduler]\nend_loops = true", "loops end"),
        ("[scheduler.reasoning_effort]\nlow.max_think_tokens = 9", "a client's reasoning effort limits its thinking"),
        ("[entropy]\nrpdi_threshold = 1.5", "thinking ends when it strays (RPDI above 1.5)"),
        ("[entropy]\nprobe_suffix = 'Answer: '", "thinking ends when its answer has settled (EAT)"),
        ("[model]\ninterrupt = 'Wait'", "interrupts end thinking"),
        ("[model]\nstop_strings = 'answer'", "stop strings bind only in the answer"),
        ("[policy.budget]\nsource = 'native:deer'", "the budget policy native:deer ends thinking"),
        ("[policy.budget]\nsource = 'native:deer'\nmode = 'shadow'", "as vLLM"),
        ("[scheduler]\nmin_think_tokens = 9\n[model]\nforce_phrase = 'x</think>'\ntool_call = '<c>'", "as vLLM"),
        ("[scheduler]\nend_loops = true\n[model]\nthink_start = ''\nthink_end = ''", "as vLLM"),
    ] {
        assert_eq!(parse(text).outputs(), outputs, "{text}");
    }
}
