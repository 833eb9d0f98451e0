//! The generator: fits, determinism, order, independence of its parts.

use meridian_bench::trace::{Class, Generator, Prefix, TraceRequest, Wave, Workload};

fn requests(workload: &Workload, seed: u64, count: usize) -> Vec<TraceRequest> {
    Generator::new(workload, seed).expect("a valid workload").take(count).collect()
}

fn preset(name: &str) -> Workload {
    Workload::named(name).expect("a preset")
}

struct Figures {
    mean: f64,
    p50: u32,
    p95: u32,
}

fn figures(requests: &[TraceRequest], field: impl Fn(&TraceRequest) -> u32) -> Figures {
    let mut values: Vec<u32> = requests.iter().map(field).collect();
    values.sort_unstable();
    let at = |share: f64| values[(share * values.len() as f64) as usize];
    let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len() as f64;
    Figures { mean, p50: at(0.5), p95: at(0.95) }
}

#[track_caller]
fn near(what: &str, got: f64, wanted: f64, share: f64) {
    println!("{what}: {got:.3} for {wanted}");
    assert!((got / wanted - 1.0).abs() <= share, "{what}: got {got:.3}, expected {wanted} within {share}");
}

#[test]
fn reasoning_chat_fits_the_sample() {
    for seed in [1, 2] {
        let all = requests(&Workload::reasoning_chat(), seed, 200_000);
        let prompt = (figures(&all, |r| r.prompt_tokens), [937.0, 117.0, 5034.0]);
        let think = (figures(&all, |r| r.think_tokens), [2480.0, 1526.0, 8008.0]);
        let output = (figures(&all, |r| r.output_tokens), [557.0, 305.0, 2045.0]);
        for (name, (got, [mean, p50, p95])) in [("prompt", prompt), ("think", think), ("output", output)] {
            near(&format!("{name} mean, seed {seed}"), got.mean, mean, 0.05);
            near(&format!("{name} p50, seed {seed}"), got.p50.into(), p50, 0.12);
            near(&format!("{name} p95, seed {seed}"), got.p95.into(), p95, 0.10);
        }
        let share = |r: &TraceRequest| f64::from(r.think_tokens) / f64::from(r.think_tokens + r.output_tokens);
        near("share of thinking", all.iter().map(share).sum::<f64>() / all.len() as f64, 0.74, 0.02);
        near("rate", all.len() as f64 / all[all.len() - 1].arrival_s, 1.05, 0.05);
    }
}

#[test]
fn plain_chat_fits_azure_conversations() {
    let all = requests(&Workload::plain_chat(), 1, 100_000);
    let (prompt, output) = (figures(&all, |r| r.prompt_tokens), figures(&all, |r| r.output_tokens));
    assert!(all.iter().all(|r| r.think_tokens == 0));
    near("prompt mean", prompt.mean, 1155.0, 0.05);
    near("prompt p95", prompt.p95.into(), 4083.0, 0.10);
    near("output mean", output.mean, 211.0, 0.05);
    near("output p50", output.p50.into(), 129.0, 0.1);
    near("output p95", output.p95.into(), 451.0, 0.1);
}

#[test]
fn multi_turn_fits_mooncake() {
    let all = requests(&Workload::multi_turn(), 1, 100_000);
    let (prompt, output) = (figures(&all, |r| r.prompt_tokens), figures(&all, |r| r.output_tokens));
    near("prompt mean", prompt.mean, 12_035.0, 0.05);
    near("prompt p50", prompt.p50.into(), 6909.0, 0.1);
    near("prompt p95", prompt.p95.into(), 39_552.0, 0.10);
    near("output mean", output.mean, 343.0, 0.05);
    near("output p95", output.p95.into(), 698.0, 0.1);
    let mut histories = std::collections::HashMap::new();
    let (mut reused, mut sum) = (0.0, 0.0);
    for request in &all {
        sum += f64::from(request.prompt_tokens);
        let Prefix::Session { id, turn } = request.prefix else { continue };
        let history: u32 = histories.insert(id, request.prompt_tokens + request.output_tokens).unwrap_or(0);
        assert_eq!(turn == 0, history == 0, "turns come in order");
        assert!(turn == 0 || request.prompt_tokens > history, "a prompt has its history and new text");
        reused += f64::from(history);
    }
    near("reuse", reused / sum, 0.366, 0.1);
    near("rate", all.len() as f64 / all[all.len() - 1].arrival_s, 3.4, 0.05);
}

/// FNV-1a over all fields, so that the constants below hang on no hasher of a library.
fn hash(requests: &[TraceRequest]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut eat = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for r in requests {
        eat(&((r.arrival_s * 1e6).round() as u64).to_le_bytes());
        for tokens in [r.prompt_tokens, r.think_tokens, r.output_tokens] {
            eat(&tokens.to_le_bytes());
        }
        eat(r.tenant.as_bytes());
        eat(&r.priority.to_le_bytes());
        eat(&r.deadline_ms.to_bits().to_le_bytes());
        if let Prefix::Session { id, turn } = r.prefix {
            eat(&id.to_le_bytes());
            eat(&turn.to_le_bytes());
        }
    }
    hash
}

#[test]
fn a_seed_is_a_trace() {
    let hashes = Workload::NAMES.map(|name| format!("{name} {:016x}", hash(&requests(&preset(name), 1, 10_000))));
    assert_eq!(
        hashes,
        ["reasoning-chat e8a7e98ae2a0684c", "plain-chat 8b095069309acf42", "multi-turn 91ff8502e9ba5693"]
    );
    assert_ne!(hash(&requests(&preset("plain-chat"), 2, 10)), hash(&requests(&preset("plain-chat"), 1, 10)));
}

#[test]
fn a_part_changes_nothing_else() {
    let base = requests(&Workload::reasoning_chat(), 7, 2000);
    let mut changed = Workload::reasoning_chat();
    changed.prompt.median = 500.0;
    changed.classes = vec![
        Class { weight: 1.0, priority: -1, deadline_ms: Some(2000.0) },
        Class { weight: 3.0, priority: 2, deadline_ms: None },
    ];
    let other = requests(&changed, 7, 2000);
    for (a, b) in base.iter().zip(&other) {
        assert_eq!((a.arrival_s, a.think_tokens, &a.tenant), (b.arrival_s, b.think_tokens, &b.tenant));
    }
    let urgent = other.iter().filter(|r| r.priority == -1 && r.deadline_ms == 2000.0).count();
    assert!((400..600).contains(&urgent), "{urgent} of 2000 in a class of a quarter");
}

#[test]
fn arrivals_are_in_order_and_as_bursty_as_asked() {
    for (gap_cv, wave) in [(0.0, None), (1.0, None), (3.0, Some(Wave { amplitude: 0.3, period_s: 600.0 }))] {
        let mut workload = Workload::reasoning_chat();
        workload.arrivals.gap_cv = gap_cv;
        workload.arrivals.regime = None;
        workload.arrivals.wave = wave;
        let all = requests(&workload, 1, 50_000);
        let gaps: Vec<f64> = all.windows(2).map(|pair| pair[1].arrival_s - pair[0].arrival_s).collect();
        assert!(gaps.iter().all(|gap| *gap >= 0.0));
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        near("rate", 1.0 / mean, 1.05, 0.1);
        assert!((deviation / mean - gap_cv).abs() <= 0.02 + 0.25 * gap_cv, "cv {} for {gap_cv}", deviation / mean);
    }
}

#[test]
fn tenants_follow_zipf() {
    let all = requests(&Workload::reasoning_chat(), 1, 50_000);
    let share = |name: &str| all.iter().filter(|r| &*r.tenant == name).count() as f64 / all.len() as f64;
    near("first tenant", share("t1"), 0.52, 0.05);
    near("second over first", share("t2") / share("t1"), 2_f64.powf(-1.75), 0.05);
}

#[test]
fn toml_round_trips() {
    for name in Workload::NAMES {
        let text = toml::to_string(&preset(name)).expect("a workload is TOML");
        assert_eq!(Workload::from_toml(&text).expect("its own text"), preset(name));
    }
}

#[test]
fn toml_changes_a_preset_field_by_field() {
    let text = "preset = 'multi-turn'\nrequests_per_s = 9.0\n[sessions]\nshare = 0.5\n";
    let mut wanted = Workload::multi_turn();
    (wanted.requests_per_s, wanted.sessions.share) = (9.0, 0.5);
    assert_eq!(Workload::from_toml(text).expect("a workload"), wanted);
    assert_eq!(Workload::from_toml("").expect("nothing but defaults"), Workload::reasoning_chat());
}

#[test]
fn toml_errors_name_the_field() {
    let error = |text: &str| Workload::from_toml(text).expect_err("a bad workload").to_string();
    let messages = [
        "[prompt]\nmedian = -1.0",
        "[prompt]\nmedian = nan",
        "[prompt]\nmedain = 1.0",
        "[prompt]\nmedian = 'long'",
        "[arrivals.wave]\namplitude = 2.0\nperiod_s = 60.0",
        "requests_per_s = 0.1\n[arrivals.regime]\nfactor = 1.2\nshare = 0.3\ncycle_s = 5.0",
        "[[modes]]\nweight = 1.0\nthink_share = 1.0\n\
         concentration = 2.0\ngenerated_median = 9.0\ngenerated_sigma = 1.0",
        "modes = []",
        "[tenants]\ncount = 0",
        "preset = 'fast'",
        "preset = 1",
        "requests_per_s = ",
    ]
    .map(error);
    let wanted = [
        "workload field prompt.median: got -1, expected tokens from 1 to 10000000",
        "workload field prompt.median: got NaN, expected tokens from 1 to 10000000",
        "workload: prompt.medain: unknown field `medain`, expected one of `median`, `sigma`, `tail_share`, `tail_from`, \
         `tail_to`, `tail_alpha`, `most_tokens`",
        "workload: prompt.median: invalid type: string \"long\", expected f64",
        "workload field arrivals.wave.amplitude: got 2, expected a share from 0 to 0.99",
        "workload field arrivals.regime.cycle_s: got 5, expected seconds from 1 / requests_per_s to 1e9",
        "workload field modes.0.think_share: got 1, expected a share from 0 to 0.999",
        "workload field modes: got 0 modes, expected at least one of positive weight",
        "workload field tenants.count: got 0, expected tenants from 1 to 1000000",
        "workload \"fast\": unknown, expected one of reasoning-chat, plain-chat, multi-turn",
        "workload field preset: got 1, expected the name of a preset",
        "workload: line 1, column 18: string values must be quoted, expected literal string",
    ];
    assert_eq!(messages, wanted);
}
