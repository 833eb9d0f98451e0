//! Readers: every format from a small text, and what happens with the options.

use std::path::Path;

use meridian_bench::trace::{
    Format, Prefix, ReadOptions, Session, ThinkSplit, Trace, TraceError, TraceRequest, read, read_from, write_sessions,
};

fn parse(name: &str, text: &str) -> Trace {
    parse_with(name, text, &ReadOptions::default())
}

fn parse_with(name: &str, text: &str, options: &ReadOptions) -> Trace {
    match read_from(name, text.as_bytes(), None, options) {
        Ok(trace) => trace,
        Err(error) => panic!("{error}"),
    }
}

/// (arrival, prompt, think, output)
fn lengths(trace: &Trace) -> Vec<(f64, u32, u32, u32)> {
    trace.requests.iter().map(|r| (r.arrival_s, r.prompt_tokens, r.think_tokens, r.output_tokens)).collect()
}

#[test]
fn the_projects_own_csv_has_optional_columns() {
    let trace = parse(
        "own.csv",
        "arrival_s,prompt_tokens,think_tokens,output_tokens,tenant,priority,deadline_ms,session,turn\n\
         10.5,20,30,40,acme,-3,1500,7,1\n\
         10.25,1,0,1,,,inf,,\n",
    );
    assert_eq!(trace.format, Format::Meridian);
    assert_eq!((&*trace.name, trace.notes.len()), ("own.csv", 0));
    let second = TraceRequest {
        arrival_s: 0.25,
        prompt_tokens: 20,
        think_tokens: 30,
        output_tokens: 40,
        tenant: "acme".into(),
        priority: -3,
        deadline_ms: 1500.0,
        prefix: Prefix::Session { id: 7, turn: 1 },
    };
    assert_eq!(trace.requests, [TraceRequest::default(), second]);
}

#[test]
fn the_projects_own_json_lines_are_told_by_suffix() {
    for name in ["own.jsonl", "own.ndjson", "OWN.JSONL"] {
        let trace = parse(
            name,
            "{\"arrival_s\": 1, \"prompt_tokens\": 5, \"think_tokens\": 6, \"output_tokens\": 7, \"tenant\": null}\n\n\
             {\"arrival_s\": 2.0, \"prompt_tokens\": \"8\", \"think_tokens\": 9.0, \"output_tokens\": 10}",
        );
        assert_eq!((trace.format, lengths(&trace)), (Format::Meridian, vec![(0.0, 5, 6, 7), (1.0, 8, 9, 10)]));
    }
}

#[test]
fn a_byte_order_mark_and_carriage_returns_are_no_text() {
    let trace = parse("dos.csv", "\u{feff}arrival_s,prompt_tokens,think_tokens,output_tokens\r\n0,1,2,3\r\n");
    assert_eq!(lengths(&trace), [(0.0, 1, 2, 3)]);
}

#[test]
fn servegen_says_the_reasoning_in_several_ways() {
    let tokens = parse("s.csv", "client_id,timestamp,input_tokens,reason_tokens,answer_tokens\n29,5.5,10,900,100\n");
    let share = parse("s.csv", "client_id,timestamp,input_tokens,output_tokens,reason_ratio\n29,5.5,10,1000,0.9\n");
    let difference =
        parse("s.csv", "client_id,timestamp,input_tokens,output_tokens,answer_tokens\n29,5.5,10,1000,100\n");
    let sum = parse(
        "s.jsonl",
        "{\"client_id\": 29, \"timestamp\": 5, \"input_tokens\": 10, \"output_tokens\": 1000, \
                                 \"reason_tokens\": 900}",
    );
    for trace in [tokens, share, difference, sum] {
        assert_eq!((trace.format, lengths(&trace)), (Format::ServeGen, vec![(0.0, 10, 900, 100)]));
        assert_eq!(&*trace.requests[0].tenant, "29");
    }
}

#[test]
fn servegen_without_reasoning_is_split_as_asked() {
    let text = "timestamp,input_tokens,output_tokens\n0,10,1000\n1,20,2000\n2,20,0\n";
    let whole = parse("s.csv", text);
    assert_eq!(lengths(&whole), [(0.0, 10, 0, 1000), (1.0, 20, 0, 2000)]);
    assert_eq!(whole.notes, ["1 of 3 rows left out: no prompt or no generated tokens"]);
    let options = ReadOptions { think: ThinkSplit::Bimodal { seed: 1 }, ..ReadOptions::default() };
    let split = parse_with("s.csv", text, &options);
    assert_eq!(split, parse_with("s.csv", text, &options));
    assert!(split.requests.iter().zip(&whole.requests).all(|(s, w)| {
        s.think_tokens > 0 && s.output_tokens > 0 && s.think_tokens + s.output_tokens == w.output_tokens
    }));
}

#[test]
fn a_split_keeps_the_mean_share() {
    let text = format!("timestamp,input_tokens,output_tokens\n{}", "0,1,10000\n".repeat(20_000));
    let options = ReadOptions { think: ThinkSplit::Bimodal { seed: 3 }, ..ReadOptions::default() };
    let trace = parse_with("s.csv", &text, &options);
    let mean = trace.requests.iter().map(|r| f64::from(r.think_tokens) / 1e4).sum::<f64>() / 2e4;
    assert!((mean - 0.74).abs() < 0.01, "{mean}");
}

#[test]
fn azure_of_both_years_counts_from_its_first_row() {
    let of_2023 = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n\
                   2023-11-16 23:59:59.9799600,4808,10\r\n2023-11-17 00:00:00.0319600,3180,8";
    let of_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                   2024-05-10 00:00:00.009930+00:00,4808,10\n2024-05-10 00:00:00.061930+00:00,3180,8\n";
    for text in [of_2023, of_2024] {
        let trace = parse("azure.csv", text);
        assert_eq!((trace.format, lengths(&trace)), (Format::Azure, vec![(0.0, 4808, 0, 10), (0.052, 3180, 0, 8)]));
    }
}

const SESSION: &str = r#"{"id": "a", "block_size": 64, "system_tokens": 5, "tool_tokens": 9, "requests": [
[0.0, 150, 20, 4.0, 0.0, "tool_use", 1, [1, 2]], [9.0, 300, 0, null, null, "", 0, [[1, 1], [3, 4], 5]],
[90.0, 310, 8, 2.0, 60.0, "end_turn", 0, [[1, 1], [3, 5]]]]}"#;

#[test]
fn sessions_of_agents_keep_their_gaps_and_blocks() {
    let trace = parse("agents.jsonl", &format!("{}\n", SESSION.replace('\n', " ")));
    assert_eq!((trace.format, trace.requests.len()), (Format::Agentic, 0));
    let session = &trace.sessions[0];
    assert_eq!((&*session.id, session.block_tokens), ("a", 64));
    let of = |at: usize| {
        let request = &session.requests[at];
        (request.gap_s, request.prompt_tokens, request.output_tokens, request.stopped_for_tool)
    };
    // Without a recorded gap: from the end of the request before to the start of this one.
    assert_eq!([of(0), of(1), of(2)], [(0.0, 150, 20, true), (5.0, 300, 1, false), (60.0, 310, 8, false)]);
    assert_eq!(*session.requests[1].blocks, [[1, 1], [3, 5]], "neighbours are one range");
    let known: Vec<u32> = session.requests.iter().map(|request| request.known_blocks).collect();
    let next: Vec<u32> = session.requests.iter().map(|request| request.next_blocks).collect();
    assert_eq!((known, next), (vec![0, 1, 4], vec![1, 4, 0]));
    assert_eq!(trace.notes.len(), 4, "{:?}", trace.notes);
    let think = ThinkSplit::Bimodal { seed: 1 };
    let options = ReadOptions { think, clip_tokens: Some(200), limit: Some(1), ..ReadOptions::default() };
    let text = format!("{}\n", SESSION.replace('\n', " "));
    let clipped = read_from("agents.jsonl", text.as_bytes(), None, &options).expect("readable");
    let requests = &clipped.sessions[0].requests;
    assert!(requests.iter().all(|r| r.prompt_tokens + r.think_tokens + r.output_tokens <= 200));
    assert_eq!(requests[0].think_tokens + requests[0].output_tokens, 20);
    assert_eq!(requests[2].blocks.iter().map(|[first, last]| last - first + 1).sum::<u32>(), 3);
    assert_eq!(requests[1].think_tokens, 0, "it is not known to think");
}

/// As kv-cache-tester publishes them: a file or a line a session, requests as objects, sub-agents within.
#[test]
fn published_sessions_have_sub_agents() {
    let text = r#"{
 "id": "a{}[", "models": ["m"], "block_size": 64, "hash_id_scope": "global",
 "requests": [
  {"t": 0.0, "type": "n", "in": 150, "out": 20, "hash_ids": [9000000001, 9000000002], "stop": "tool_use",
   "output_types": ["thinking", "tool_use"], "api_time": 4.0, "think_time": 0.0},
  {"t": 9.0, "type": "subagent", "agent_id": "b", "requests": [
   {"t": 0.0, "type": "s", "in": 64, "out": 3, "hash_ids": [7], "stop": "tool_use"},
   {"type": "subagent", "requests": []},
   {"t": 2.5, "type": "s", "in": 128, "out": 4, "hash_ids": [7, 8, 9], "think_time": -0.5}
  ]},
  {"t": 30.0, "type": "s", "in": 300, "out": null, "hash_ids": [9000000001, 3, 4, 5], "stop": null, "think_time": 26.0}
 ], "_analysis": {"total": 3}
}"#;
    let trace = parse("a.json", text);
    assert_eq!((trace.format, trace.sessions.len()), (Format::Agentic, 2));
    let of = |session: &Session| {
        let requests = session.requests.iter();
        let facts = requests.map(|r| (r.gap_s, r.prompt_tokens, r.output_tokens, r.stopped_for_tool, r.known_blocks));
        (session.id.to_string(), facts.collect::<Vec<_>>())
    };
    let own = ("a{}[".to_owned(), vec![(0.0, 150, 20, true, 0), (26.0, 300, 1, false, 1)]);
    let below = ("a{}[/b".to_owned(), vec![(0.0, 64, 3, true, 0), (0.0, 128, 4, false, 1)]);
    assert_eq!((of(&trace.sessions[0]), of(&trace.sessions[1])), (own, below));
    for note in [
        "1 of 4 requests have no generated tokens: they generate one",
        "1 of 4 requests list more blocks than their prompt has: the first ones count",
        "2 sub-agents are sessions of their own: nothing waits for another session",
    ] {
        assert!(trace.notes.iter().any(|known| known == note), "{note}: {:?}", trace.notes);
    }
    // One after another, in lines of their own, or as an array.
    let line = text.replace('\n', "");
    for many in [format!("{text}{text}"), format!("{line}\n\n{line}\n"), format!("\u{feff}[{text},\n{line}]\n")] {
        let sessions = parse("a.json", &many).sessions;
        assert_eq!(
            sessions.iter().map(of).collect::<Vec<_>>(),
            [&trace.sessions[..]; 2].concat().iter().map(of).collect::<Vec<_>>()
        );
        let first = ReadOptions { limit: Some(1), ..ReadOptions::default() };
        assert_eq!(read_from("a.json", many.as_bytes(), None, &first).expect("readable").sessions.len(), 2);
    }
    let mut written = Vec::new();
    write_sessions(&trace.sessions, &mut written).expect("a vector takes all bytes");
    let again = read_from("b.jsonl", &written[..], None, &ReadOptions::default()).expect("readable");
    assert_eq!(again.sessions.iter().map(of).collect::<Vec<_>>(), trace.sessions.iter().map(of).collect::<Vec<_>>());
}

#[test]
fn a_shrunk_session_shares_as_much_of_its_prompts() {
    let trace = parse("agents.jsonl", &format!("{}\n", SESSION.replace('\n', " ")));
    let small = trace.sessions[0].shrunk(16).expect("16 divides 64").with_gaps(0.5, 1.0);
    assert_eq!((small.block_tokens, small.requests[1].prompt_tokens, small.requests[2].gap_s), (4, 18, 30.0));
    assert_eq!(small.requests[2].known_blocks, 4);
    let gaps = |user_times: f64| {
        let session = trace.sessions[0].clone().with_gaps(1.0, user_times);
        session.requests.iter().map(|request| request.gap_s).collect::<Vec<_>>()
    };
    let (own, shorter) = (gaps(1.0), gaps(0.5));
    for (at, request) in trace.sessions[0].requests.iter().enumerate().take(2) {
        let times = if request.stopped_for_tool { 1.0 } else { 0.5 };
        assert_eq!(shorter[at + 1], times * own[at + 1], "{own:?} {shorter:?}");
    }
    assert_eq!((trace.sessions[0].shrunk(48), trace.sessions[0].shrunk(0)), (None, None));
}

#[test]
fn mooncake_keeps_its_blocks() {
    let trace = parse(
        "moon.jsonl",
        "{\"timestamp\": 0, \"input_length\": 1025, \"output_length\": 500, \"hash_ids\": [0, 1, 2]}\n\
         {\"timestamp\": 3001, \"input_length\": 7, \"output_length\": 4, \"hash_ids\": []}\n",
    );
    assert_eq!((trace.format, lengths(&trace)), (Format::Mooncake, vec![(0.0, 1025, 0, 500), (3.001, 7, 0, 4)]));
    assert_eq!(trace.requests[0].prefix, Prefix::Blocks { tokens: 512, ids: [0, 1, 2].into() });
    assert_eq!(trace.requests[1].prefix, Prefix::None);
}

#[test]
fn vllm_bench_takes_start_times_else_the_rate() {
    let text = |more: &str| {
        format!(
            "{{\"date\": \"x\", \"input_lens\": [10, 20, 30], \"output_lens\": [5, 0, 7], \"itls\": [[0.1]], {more}}}"
        )
    };
    let started = parse("r.json", &text("\"request_rate\": \"inf\", \"start_times\": [7.5, 8.0, 7.0]"));
    assert_eq!((started.format, lengths(&started)), (Format::VllmBench, vec![(0.0, 30, 0, 7), (0.5, 10, 0, 5)]));
    assert_eq!(started.notes, ["1 of 3 rows left out: no prompt or no generated tokens"]);
    let spread = parse("r.json", &text("\"request_rate\": 4.0"));
    assert_eq!(lengths(&spread), [(0.0, 10, 0, 5), (0.5, 30, 0, 7)]);
    assert_eq!(spread.notes[0], "no start_times: arrivals spread evenly at request_rate 4 per second");
    let at_once = parse("r.json", &text("\"request_rate\": \"inf\""));
    assert_eq!(at_once.notes[0], "no start_times and no finite request_rate: all requests arrive at once");
}

#[test]
fn a_vllm_result_of_many_lines_is_detected() {
    let trace = parse("result.json", "{\n  \"input_lens\": [1],\n  \"output_lens\": [2],\n  \"start_times\": [3.0]\n}");
    assert_eq!(trace.format, Format::VllmBench);
}

#[test]
fn limit_counts_rows_of_the_file() {
    let options = ReadOptions { limit: Some(2), ..ReadOptions::default() };
    let text = "arrival_s,prompt_tokens,think_tokens,output_tokens\n5,1,1,1\n3,2,2,2\n1,3,3,3\n";
    assert_eq!(lengths(&parse_with("l.csv", text, &options)), [(0.0, 2, 2, 2), (2.0, 1, 1, 1)]);
}

#[test]
fn clipping_takes_prompt_first_then_all_that_is_generated() {
    let text = "arrival_s,prompt_tokens,think_tokens,output_tokens\n0,900,300,100\n1,900,3000,1000\n2,5,5,5\n";
    for (most, wanted) in [
        (1000, [(600, 300, 100), (250, 563, 187), (5, 5, 5)]),
        (2, [(1, 0, 1), (1, 0, 1), (1, 0, 1)]),
        (0, [(1, 0, 1), (1, 0, 1), (1, 0, 1)]),
    ] {
        let trace = parse_with("c.csv", text, &ReadOptions { clip_tokens: Some(most), ..ReadOptions::default() });
        let got: Vec<_> =
            lengths(&trace).into_iter().map(|(_, prompt, think, output)| (prompt, think, output)).collect();
        assert_eq!(got, wanted);
        assert_eq!(trace.notes.len(), 1, "{:?}", trace.notes);
    }
    let blocks = "{\"timestamp\": 0, \"input_length\": 1500, \"output_length\": 10, \"hash_ids\": [1, 2, 3]}";
    let trace = parse_with("m.jsonl", blocks, &ReadOptions { clip_tokens: Some(600), ..ReadOptions::default() });
    assert_eq!(trace.requests[0].prefix, Prefix::Blocks { tokens: 512, ids: [1, 2].into() });
}

#[test]
fn a_given_format_wins_over_the_first_line() {
    let text = "arrival_s,prompt_tokens,think_tokens,output_tokens,tenant\n2,10,20,30,5\n";
    let trace = read_from("x.csv", text.as_bytes(), Some(Format::ServeGen), &ReadOptions::default())
        .expect("names that servegen knows too");
    // In this format, generated tokens are thinking and answer together.
    assert_eq!(lengths(&trace), [(0.0, 10, 20, 10)]);
}

#[test]
fn names_are_parsed_and_shown() {
    for format in Format::ALL {
        assert_eq!(format.to_string().parse::<Format>().expect("its own name"), format);
    }
}

#[test]
fn a_file_that_is_not_there_says_so() {
    let error = read(Path::new("no/such/trace.csv"), None, &ReadOptions::default()).expect_err("no file");
    assert!(matches!(error, TraceError::Io { .. }));
    assert_eq!(error.to_string(), "trace.csv: cannot be read");
}
