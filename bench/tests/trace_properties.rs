//! Whatever the bytes, readers answer; whatever the requests, the project's own format gives them back.

use meridian_bench::trace::{
    Format, Generator, Prefix, ReadOptions, ThinkSplit, TraceRequest, Workload, read_from, write_csv,
};
use proptest::prelude::*;

fn request() -> impl Strategy<Value = TraceRequest> {
    // A prompt of any length has a first block.
    let session = prop_oneof![
        Just(Prefix::None),
        (any::<u64>(), any::<u32>()).prop_map(|(id, turn)| Prefix::Session { id, turn }),
        (1_u32..=10_000_000, any::<u64>()).prop_map(|(tokens, id)| Prefix::Blocks { tokens, ids: [id].into() }),
    ];
    let deadline = prop_oneof![Just(f64::INFINITY), 0.0..1e12];
    // The reader takes white space around a value for padding.
    let tenant = "[^\\s]{0,8}( [^\\s]{1,4})?".prop_map(|text| text.trim().to_owned());
    let lengths = (1_u32..=10_000_000, 0_u32..=10_000_000, 1_u32..=10_000_000);
    (0.0..1e9, lengths, tenant, any::<i32>(), deadline, session).prop_map(
        |(arrival_s, (prompt_tokens, think_tokens, output_tokens), tenant, priority, deadline_ms, prefix)| {
            TraceRequest {
                arrival_s,
                prompt_tokens,
                think_tokens,
                output_tokens,
                tenant: tenant.into(),
                priority,
                deadline_ms,
                prefix,
            }
        },
    )
}

/// Text that comes further than bytes would: a header or the start of an object, then cells of all kinds.
fn near_miss() -> impl Strategy<Value = Vec<u8>> {
    let head = prop::sample::select(vec![
        "",
        "arrival_s,prompt_tokens,think_tokens,output_tokens\n",
        "timestamp,input_tokens,output_tokens,reason_ratio\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "{\"arrival_s\": ",
        "{\"timestamp\": 1, \"input_length\": ",
        "{\"id\": \"a\", \"block_size\": 64, \"requests\": [[0, 99, 1, null, null, \"\", 1, ",
        "{\"input_lens\": [1], \"output_lens\": ",
        "Timestamp,Session ID,Request tokens,Response tokens\n",
        "{\"chat_id\": 1, \"parent_chat_id\": -1, \"timestamp\": 1.5, \"input_length\": ",
        "{\"session_id\": \"a\", \"delay\": 5, \"output_length\": 3, \"input_length\": ",
        "{\"session_id\": \"a\", \"turns\": [{\"llm_calls\": [{\"tokens\": {\"prompt\": 90, \"completion\": ",
        "{\"metadata\": {\"request_start_ns\": 5}, \"metrics\": {\"input_sequence_length\": {\"value\": ",
        "[{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, ",
        "\u{1f}\u{8b}",
        "[[[[[[[[",
    ]);
    let cell = prop_oneof![
        prop::sample::select(vec![
            "1",
            "1e308",
            "-0",
            "nan",
            "null",
            "[1e999]",
            "\"",
            "2023-11-16 18:15:46.6",
            "2023-11-16 18:15:46+99:99",
            "18446744073709551616",
            "\"hash_ids\": [1,2]}",
            "\u{1f600}",
            "{",
            "}",
            "[",
            "]",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 0..12),
    ];
    let separator = prop::sample::select(vec![",", "\n", ": ", "\r\n", ""]);
    (head, prop::collection::vec((cell, separator), 0..24)).prop_map(|(head, cells)| {
        let mut bytes = head.as_bytes().to_vec();
        for (cell, separator) in cells {
            bytes.extend(cell);
            bytes.extend(separator.as_bytes());
        }
        bytes
    })
}

fn formats() -> Vec<Option<Format>> {
    std::iter::once(None).chain(Format::ALL.map(Some)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn own_format_gives_back_what_was_written(mut requests in prop::collection::vec(request(), 1..20)) {
        requests.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
        let start_s = requests[0].arrival_s;
        requests.iter_mut().for_each(|request| request.arrival_s -= start_s);
        let mut text = Vec::new();
        write_csv(&requests, &mut text).expect("a vector takes all bytes");
        let trace = read_from("w.csv", text.as_slice(), None, &ReadOptions::default());
        prop_assert_eq!(trace.expect("what was written").requests, requests);
    }

    #[test]
    fn no_bytes_make_a_reader_panic(
        bytes in prop_oneof![near_miss(), prop::collection::vec(any::<u8>(), 0..200)],
        format in prop::sample::select(formats()),
        name in prop::sample::select(vec!["f.csv", "f.jsonl", "f.json", "f"]),
        clip_tokens in prop::option::of(0_u32..5000),
    ) {
        let think = ThinkSplit::Bimodal { seed: 1 };
        let options = ReadOptions { think, clip_tokens, ..ReadOptions::default() };
        if let Ok(trace) = read_from(name, bytes.as_slice(), format, &options) {
            if trace.format.has_sessions() {
                prop_assert!(!trace.sessions.is_empty() && trace.requests.is_empty());
                return Ok(());
            }
            prop_assert!(!trace.requests.is_empty());
            prop_assert_eq!(trace.requests[0].arrival_s, 0.0);
            prop_assert!(trace.requests.is_sorted_by(|a, b| a.arrival_s <= b.arrival_s));
            for request in &trace.requests {
                prop_assert!(request.arrival_s.is_finite() && request.prompt_tokens > 0 && request.output_tokens > 0);
            }
        }
    }

    #[test]
    fn any_checked_workload_generates(
        (rate, gap_cv, sigma, share, turns, median) in
            (1e-6..1e6, 0.0..100.0, 0.0..10.0, 0.0..=1.0, 1.0..1e4, 1.0..1e7),
        seed in any::<u64>(),
    ) {
        let mut workload = Workload::reasoning_chat();
        workload.requests_per_s = rate;
        workload.arrivals.gap_cv = gap_cv;
        (workload.prompt.median, workload.prompt.sigma) = (median, sigma);
        (workload.modes[0].generated_median, workload.modes[0].generated_sigma) = (median, sigma);
        (workload.sessions.share, workload.sessions.mean_turns) = (share, turns);
        (workload.sessions.gap_sigma, workload.sessions.text_sigma) = (sigma, sigma);
        let mut before_s = 0.0;
        for request in Generator::new(&workload, seed).expect("a valid workload").take(200) {
            prop_assert!(request.arrival_s >= before_s && request.arrival_s.is_finite());
            prop_assert!(request.prompt_tokens > 0 && request.output_tokens > 0);
            before_s = request.arrival_s;
        }
    }
}

#[test]
fn generated_requests_round_trip() {
    for name in Workload::NAMES {
        let workload = Workload::named(name).expect("a preset");
        let mut requests: Vec<_> = Generator::new(&workload, 1).expect("a valid workload").take(1000).collect();
        let start_s = requests[0].arrival_s;
        requests.iter_mut().for_each(|request| request.arrival_s -= start_s);
        let mut text = Vec::new();
        write_csv(&requests, &mut text).expect("a vector takes all bytes");
        let trace = read_from("g.csv", text.as_slice(), None, &ReadOptions::default()).expect("what was written");
        assert_eq!(trace.requests, requests);
    }
}

#[test]
fn sessions_in_closed_loop_are_refused_rather_than_lost() {
    let prefix = Prefix::Ranges { session: 1, tokens: 512, ranges: [[0, 1]].into() };
    let error = write_csv([&TraceRequest { prefix, ..TraceRequest::default() }], Vec::new()).expect_err("no columns");
    assert_eq!(error.to_string(), "sessions in closed loop have no arrivals");
}
