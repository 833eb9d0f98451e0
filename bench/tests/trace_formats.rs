//! The formats that operators bring: each from a small text, with what its files are known for.

use std::io::Write;

use meridian_bench::trace::{
    Format, Prefix, ReadOptions, Summary, TokenCount, Tool, Trace, Unit, read_from, write_csv, write_for,
    write_sessions,
};

fn parse(name: &str, text: impl AsRef<[u8]>) -> Trace {
    parse_with(name, text, &ReadOptions::default())
}

#[track_caller]
fn parse_with(name: &str, text: impl AsRef<[u8]>, options: &ReadOptions) -> Trace {
    match read_from(name, text.as_ref(), None, options) {
        Ok(trace) => trace,
        Err(error) => panic!("{error}"),
    }
}

#[track_caller]
fn refused(name: &str, text: impl AsRef<[u8]>, options: &ReadOptions) -> String {
    read_from(name, text.as_ref(), None, options).expect_err("a bad file").to_string()
}

/// (arrival, prompt, think, output)
fn lengths(trace: &Trace) -> Vec<(f64, u32, u32, u32)> {
    trace.requests.iter().map(|r| (r.arrival_s, r.prompt_tokens, r.think_tokens, r.output_tokens)).collect()
}

fn prefixes(trace: &Trace) -> Vec<Prefix> {
    trace.requests.iter().map(|request| request.prefix.clone()).collect()
}

fn turn(id: u64, turn: u32) -> Prefix {
    Prefix::Session { id, turn }
}

/// Two requests of one chat.
const CHATS: &str = concat!(
    r#"{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 9, "type": "text", "#,
    r#""turn": 1, "hash_ids": [3, 4, 5]}"#,
    "\n",
    r#"{"chat_id": 9, "parent_chat_id": 7, "timestamp": 63.0, "input_length": 90, "output_length": 5, "type": "text", "#,
    r#""turn": 2, "hash_ids": [3, 4, 6, 7, 8, 9]}"#,
    "\n",
);

#[test]
fn bailian_counts_seconds_and_blocks_of_16() {
    let trace = parse("t.jsonl", CHATS);
    assert_eq!((trace.format, lengths(&trace)), (Format::Bailian, vec![(0.0, 40, 0, 9), (1.5, 90, 0, 5)]));
    assert_eq!(trace.requests[0].prefix, Prefix::Blocks { tokens: 16, ids: [3, 4, 5].into() });
    assert_eq!(trace.notes, ["2 requests in 1 conversations, by chat_id and parent_chat_id"]);
    // The last shared block is the second: the third of the first prompt was not full.
    assert_eq!(Summary::of(&trace).reuse, 32.0 / 130.0);
}

#[test]
fn bailian_without_blocks_has_its_conversations() {
    let line = |chat: i64, parent: &str, at: f64| {
        format!("{{\"chat_id\": {chat}, {parent}\"timestamp\": {at}, \"input_length\": 40, \"output_length\": 9}}\n")
    };
    let parents = ["\"parent_chat_id\": -1, ", "\"parent_chat_id\": 1, ", "", "\"parent_chat_id\": 99, "];
    let text: String = parents.iter().enumerate().map(|(at, parent)| line(at as i64 + 1, parent, at as f64)).collect();
    let trace = parse("t.jsonl", text);
    assert_eq!(trace.format, Format::Bailian);
    assert_eq!(prefixes(&trace), [turn(0, 0), turn(0, 1), turn(1, 0), turn(2, 0)]);
    let summary = Summary::of(&trace);
    assert_eq!((summary.sessions, summary.in_sessions, summary.requests_per_s), (1, 2, Some(1.0)));
}

#[test]
fn burstgpt_has_two_layouts_and_failures() {
    let old = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n\
               5,ChatGPT,472,18,490,Conversation log\r\n50,GPT-4,100,0,100,API log\r\n45.5,\"GPT-4\",1087,230,1317,x\r\n";
    for text in [old.to_owned(), format!("\u{feff}{old}")] {
        let trace = parse("a.csv", text);
        assert_eq!((trace.format, lengths(&trace)), (Format::BurstGpt, vec![(0.0, 472, 0, 18), (40.5, 1087, 0, 230)]));
        assert_eq!(trace.notes, ["1 of 3 rows left out: no prompt or no generated tokens"]);
    }
    let new = "Response tokens,Timestamp,Session ID,Elapsed time,Request tokens\n\
               276,9,u,3.1,417\n27,20,u,3.1,700\n5,21,v,1,10\n5,30,u,1,20\n";
    let trace = parse("b.csv", new);
    // The last is shorter than what its session said: it begins anew.
    assert_eq!(prefixes(&trace), [turn(0, 0), turn(0, 1), turn(1, 0), turn(2, 0)]);
}

/// A turn of three calls; the last was cancelled.
const SESSIONS: &str = r#"{"session_id": "s", "date": "2026-06-01", "turns": [{"turn_id": "t", "llm_calls": [
{"message_id": "m", "timestamp": "2026-06-01T00:00:01Z", "duration_ms": 2000.0, "result": "Success",
 "tokens": {"prompt": 850, "completion": 50, "cached": 700}},
{"message_id": "n", "timestamp": "2026-06-01T00:00:07.5Z", "duration_ms": 10, "result": "Success",
 "tokens": {"prompt": 1000, "completion": 0, "cached": 800}},
{"message_id": "o", "timestamp": "2026-06-01T00:00:09Z", "result": "UserCancel", "tokens": {"prompt": 10, "completion": 0}}],
"tool_batches": [{"request_id": "m", "function_calls": [{"name": "read"}]}]}]}"#;

#[test]
fn copilot_is_sessions_in_closed_loop() {
    let trace = parse("t.jsonl", SESSIONS.replace('\n', " "));
    assert_eq!((trace.format, trace.sessions.len(), trace.requests.len()), (Format::Copilot, 1, 0));
    let [first, second] = trace.sessions[0].requests.as_slice() else { panic!("two calls") };
    assert_eq!((first.prompt_tokens, first.output_tokens, first.stopped_for_tool), (850, 50, true));
    assert_eq!((second.gap_s, second.output_tokens, second.stopped_for_tool), (4.5, 1, false));
    // 800 cached tokens are 50 blocks of the 53 that the call before had.
    assert_eq!((second.known_blocks, &*second.blocks), (50, &[[0, 49], [53, 64]][..]));
    assert_eq!(trace.notes[0], "1 of 3 calls left out: they failed, or have no prompt");
}

#[test]
fn sessions_of_aiperf_grow_and_wait() {
    let text = r#"{"session_id": "a", "timestamp": 1000, "input_length": 100, "output_length": 10}
{"session_id": "a", "delay": 500, "input_length": 30, "output_length": 20}
{"session_id": "b", "input_length": 5, "output_length": 5}
"#;
    let trace = parse("m.jsonl", text);
    assert_eq!(trace.format, Format::Mooncake);
    assert_eq!(lengths(&trace), [(0.0, 5, 0, 5), (1.0, 100, 0, 10), (1.5, 140, 0, 20)]);
    assert_eq!(prefixes(&trace), [turn(1, 0), turn(0, 0), turn(0, 1)]);
    assert_eq!(trace.notes.len(), 3, "{:?}", trace.notes);
    let endless = parse(
        "e.jsonl",
        "{\"timestamp\": 5, \"input_length\": 655}\n{\"timestamp\": 10, \"input_length\": 7, \"output_length\": 9}\n",
    );
    assert_eq!((endless.format, lengths(&endless)), (Format::Mooncake, vec![(0.0, 655, 0, 128), (0.005, 7, 0, 9)]));
    assert_eq!(endless.notes, ["1 requests have no output_length: each generates 128 tokens"]);
    let own = r#"{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
    assert_eq!(parse("m.jsonl", own).requests[0].prefix, Prefix::Blocks { tokens: 512, ids: [1, 2].into() });
}

#[test]
fn units_and_block_sizes_can_be_said() {
    let text = "{\"timestamp\": 2, \"input_length\": 40, \"output_length\": 1, \"hash_ids\": [1, 2, 3]}\n\
                {\"timestamp\": 3.5, \"input_length\": 40, \"output_length\": 1}\n";
    let said = refused("m.jsonl", text, &ReadOptions::default());
    assert!(said.contains("at most 1 blocks of 512 tokens, not 3; --trace-block-tokens N"), "{said}");
    let options = ReadOptions { unit: Some(Unit::S), block_tokens: Some(16), ..ReadOptions::default() };
    let trace = parse_with("m.jsonl", text, &options);
    assert_eq!(lengths(&trace), [(0.0, 40, 0, 1), (1.5, 40, 0, 1)]);
}

#[test]
fn a_rate_of_another_unit_is_noted() {
    let rows = |step: f64| -> String {
        (0..40)
            .map(|at| {
                format!("{{\"timestamp\": {}, \"input_length\": 4, \"output_length\": 1}}\n", f64::from(at) * step)
            })
            .collect()
    };
    assert!(parse("m.jsonl", rows(100.0)).notes.is_empty());
    for step in [0.1, 1e8] {
        let notes = parse("m.jsonl", rows(step)).notes;
        assert!(notes.len() == 1 && notes[0].contains("--unit s, ms, us or ns"), "{notes:?}");
    }
}

#[test]
fn an_export_of_aiperf_has_times_lengths_and_errors() {
    let record = |start: u64, metrics: &str, more: &str| {
        format!(
            "{{\"metadata\": {{\"x_correlation_id\": \"c\", \"request_start_ns\": {start}, \
             \"benchmark_phase\": \"profiling\"{more}}}, \
             \"metrics\": {{{metrics}}}, \"error\": null}}\n"
        )
    };
    let tokens = |input: u32, output: u32| {
        format!(
            "\"input_sequence_length\": {{\"value\": {input}, \"unit\": \"tokens\"}}, \
             \"output_sequence_length\": {{\"value\": {output}}}"
        )
    };
    let thinks = format!("{}, \"reasoning_token_count\": {{\"value\": 6}}", tokens(600, 9));
    let text = [
        record(1_759_813_207_500_000_000, &tokens(550, 9), ""),
        record(1_759_813_209_000_000_000, &thinks, ""),
        record(1_759_813_209_100_000_000, "\"error_isl\": {\"value\": 550}", ", \"was_cancelled\": true"),
    ]
    .concat();
    let trace = parse("profile_export.jsonl", text);
    assert_eq!((trace.format, lengths(&trace)), (Format::AiperfExport, vec![(0.0, 550, 0, 9), (1.5, 600, 6, 3)]));
    assert_eq!(prefixes(&trace), [turn(0, 0), turn(0, 1)]);
    assert_eq!(trace.notes, ["1 of 3 rows left out: no prompt or no generated tokens"]);
}

#[test]
fn appended_results_follow_each_other() {
    let run = |start: f64, more: &str| {
        format!(
            "{{\"input_lens\": [10, 20], \"output_lens\": [5, 7], \"start_times\": [{start}, {}]{more}}}",
            start + 0.5
        )
    };
    let text = format!("{}\n{}{}", run(100.0, ", \"duration\": 2.0"), run(7.0, ""), run(9.0, ""));
    let trace = parse("r.json", text);
    assert_eq!(trace.format, Format::VllmBench);
    let arrivals: Vec<f64> = trace.requests.iter().map(|request| request.arrival_s).collect();
    assert_eq!(arrivals, [0.0, 0.5, 2.0, 2.5, 2.5, 3.0]);
    assert_eq!(trace.notes, ["3 results: each begins where the one before ends"]);
}

#[test]
fn texts_need_a_tokenizer() {
    let talk = r#"{"id": "x", "conversations": [{"from": "human", "value": "aaaa"}, {"from": "gpt", "value": "bb"},
 {"from": "human", "value": "c"}, {"from": "gpt", "value": "ddd"}]}"#;
    let talk = talk.replace('\n', "");
    let said = refused("s.json", format!("[{talk}]"), &ReadOptions::default());
    assert_eq!(said, "s.json: has texts and no counts of tokens, expected --tokenizer FILE, a tokenizer.json");
    let count = TokenCount::new(|text| Ok(text.len()));
    let options = ReadOptions { count: Some(count), ..ReadOptions::default() };
    for text in [format!("[{talk}, {talk}]"), format!("{talk}\n{talk}"), format!("\u{feff} [\n{talk},\n{talk}\n]\n")] {
        let trace = parse_with("s.json", text, &options);
        assert_eq!(trace.format, Format::ShareGpt);
        let one = [(0.0, 4, 0, 2), (0.0, 7, 0, 3)];
        assert_eq!(lengths(&trace), [one, one.map(|(_, prompt, think, output)| (1.0, prompt, think, output))].concat());
        assert_eq!(prefixes(&trace)[..2], [turn(0, 0), turn(0, 1)]);
    }
    let limited = ReadOptions { limit: Some(1), ..options.clone() };
    assert_eq!(parse_with("s.json", format!("[{talk}, {talk}, 7"), &limited).requests.len(), 2);
    let said = refused("s.json", format!("[{talk}, 7]"), &options);
    assert!(
        said.starts_with("s.json:1: column (all): got") && said.ends_with("expected an array of conversations"),
        "{said}"
    );
    let failing = ReadOptions { count: Some(TokenCount::new(|_| Err("no".into()))), ..ReadOptions::default() };
    assert_eq!(refused("s.json", format!("[{talk}]"), &failing), "s.json: the tokens of a text cannot be counted: no");
}

#[test]
fn any_columns_can_be_named() {
    let columns = |text: &str| ReadOptions { columns: Some(text.parse().expect("columns")), ..ReadOptions::default() };
    let csv =
        "when,\"in, all\",out,thought,who,talk\n2024-05-10 00:00:00,10,9,4,x,a\n2024-05-10 00:00:01.5,30,5,,y,a\n";
    let options = columns("arrival=when,prompt=out,output=thought");
    assert!(refused("c.csv", csv.replace("4,x", "-4,x"), &options).contains("c.csv:2: column thought"), "negative");
    let said = refused("c.csv", csv, &columns("prompt=none,output=out"));
    assert!(said.contains("c.csv:1: column none") && said.contains("expected a header with"), "{said}");
    let json = "{\"t\": 1500, \"p\": 10, \"o\": 9, \"th\": 9, \"s\": \"a\", \"b\": [1]}\n\
                {\"t\": 3000, \"p\": 30, \"o\": 5, \"s\": \"a\"}\n";
    let options = ReadOptions { unit: Some(Unit::Ms), ..columns("arrival=t,prompt=p,output=o,think=th,session=s") };
    let trace = parse_with("c.txt", json, &options);
    assert_eq!((trace.format, lengths(&trace)), (Format::Columns, vec![(0.0, 10, 9, 1), (1.5, 30, 0, 5)]));
    assert_eq!(prefixes(&trace), [turn(0, 0), turn(0, 1)]);
    let blocks = "n,g,ids\n40,1,\"[1, 2, 3]\"\n40,2,1 2 4\n40,2,\n";
    let trace = parse_with("c.csv", blocks, &columns("prompt=n,output=g,blocks=ids"));
    assert_eq!(trace.requests[1].prefix, Prefix::Blocks { tokens: 16, ids: [1, 2, 4].into() });
    assert_eq!((trace.requests[2].arrival_s, &trace.requests[2].prefix), (2.0, &Prefix::None));
    for (bad, says) in [
        ("prompt", "prompt: expected KEY=COLUMN"),
        ("prompt=a", "expected output=COLUMN among them"),
        ("prompt=a,prompt=b,output=c", "prompt: expected one column"),
        ("tokens=a", "tokens: expected one of arrival, prompt"),
    ] {
        let said = bad.parse::<meridian_bench::trace::ColumnNames>().expect_err("bad columns");
        assert!(said.contains(says), "{said}");
    }
}

#[test]
fn what_has_no_requests_is_named() {
    for (name, text, says) in [
        (
            "profile_export_aiperf.json",
            "{\"request_latency\": {\"unit\": \"ms\", \"avg\": 6655.5}}",
            "a summary of AIPerf",
        ),
        ("profile_export_aiperf.csv", "Metric,avg,min,max,p99\nTTFT,1,2,3,4\n", "a summary of AIPerf"),
        (
            "chunk-0-dataset.json",
            "{\"0\": {\"fourier\": {\"mean\": 1.0}, \"input_tokens\": \"{1: 0.5}\"}}",
            "ServeGen's distributions",
        ),
        (
            "chunk-0-trace.csv",
            "0,1.33,8.59,Weibull,0.37,0.39\n600,1.2,8.1,Weibull,0.4,0.3\n",
            "ServeGen's distributions",
        ),
        ("benchmarks.json", "{\"benchmarks\": []}", "GuideLLM's report"),
        ("mine.json", "{\"schema\": 1, \"runs\": []}", "results of `meridian bench`"),
        ("t.json", "{\"traceEvents\": []}", "a timeline"),
    ] {
        let said = refused(name, text, &ReadOptions::default());
        assert!(said.starts_with(&format!("{name}: unknown format: it is {says}")), "{said}");
        assert!(said.contains("(formats: meridian, servegen,"), "{said}");
    }
    let said = refused("x.json", "{\"a\": 1}", &ReadOptions::default());
    assert!(said.starts_with("x.json: unknown format, expected one of"), "{said}");
    assert_eq!(refused("x.json", " \n", &ReadOptions::default()), "x.json: no requests, expected at least one row");
}

#[test]
fn packed_files_are_read_whatever_their_name() {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(CHATS.as_bytes()).expect("a vector takes all bytes");
    let gzip = encoder.finish().expect("a vector takes all bytes");
    let zstd = ruzstd::encoding::compress_to_vec(CHATS.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest);
    for packed in [&gzip, &zstd] {
        assert_eq!(parse("t.bin", packed).requests, parse("t.jsonl", CHATS).requests);
    }
    let cut = read_from("t.gz", &gzip[..gzip.len() - 12], None, &ReadOptions::default()).expect_err("cut short");
    let why = std::error::Error::source(&cut).expect("a cause").to_string();
    assert_eq!((cut.to_string().as_str(), why.as_str()), ("t.gz: cannot be read", "as gzip data: it is cut short"));
}

#[test]
fn rows_beyond_what_a_run_takes_are_left() {
    let mut text = "TIMESTAMP,ContextTokens,GeneratedTokens\n".to_owned();
    (0..2_000_010).for_each(|_| text.push_str("2024-05-10 00:00:00,1,1\n"));
    let trace = parse("a.csv", text);
    assert_eq!(trace.requests.len(), 2_000_000);
    assert_eq!(
        trace.notes,
        ["only the first 2000000 rows are read, as with --requests 2000000: a run has at most so many"]
    );
}

#[test]
fn arrivals_that_no_run_can_span_are_refused() {
    let line = |more: &str| format!("{{\"session_id\": \"a\", {more}\"input_length\": 1, \"output_length\": 1}}\n");
    let text = line("") + &line("\"delay\": 1e13, ").repeat(3);
    assert_eq!(
        refused("m.jsonl", text, &ReadOptions::default()),
        "m.jsonl: arrivals span 3.000e10 s, expected at most 1e10 s"
    );
}

/// What a tool sends of a trace: arrivals, lengths, and the share that a prefix cache finds.
fn sent(trace: &Trace) -> (Vec<(f64, u32, u32)>, f64) {
    let requests = trace.requests.iter().map(|r| (r.arrival_s, r.prompt_tokens, r.think_tokens + r.output_tokens));
    (requests.collect(), Summary::of(trace).reuse)
}

#[test]
fn what_is_written_for_a_tool_is_the_same_day() {
    let own = "arrival_s,prompt_tokens,think_tokens,output_tokens,session,turn\n0,1600,50,50,4,0\n0.25,7,0,3,,\n2.5,3300,9,1,4,1\n";
    for (name, text) in [("t.jsonl", CHATS), ("own.csv", own)] {
        let trace = parse(name, text);
        for tool in ["aiperf", "guidellm", "vllm"] {
            let mut out = Vec::new();
            let tool: Tool = tool.parse().expect("a tool");
            let size = write_for(tool, &trace.requests, &mut out).expect("a vector takes all bytes");
            let unit = if tool == Tool::Aiperf { Unit::Ms } else { Unit::S };
            let options = ReadOptions { unit: Some(unit), block_tokens: Some(size), ..ReadOptions::default() };
            let back = parse_with("out.jsonl", &out, &options);
            assert_eq!(back.format, Format::Mooncake);
            assert_eq!(sent(&back).0, sent(&trace).0, "{tool:?}");
            for request in &back.requests {
                let Prefix::Blocks { tokens, ids } = &request.prefix else { panic!("blocks for every prompt") };
                assert_eq!(ids.len(), request.prompt_tokens.div_ceil(*tokens) as usize, "the tools ask for all blocks");
            }
            // Of a conversation, the tools know the prompts and not the answers, and full blocks only.
            let (shared, all) = (sent(&back).1, sent(&trace).1);
            assert!(shared > 0.8 * all && shared <= all, "{tool:?}: {shared} for {all}");
        }
    }
    assert_eq!("locust".parse::<Tool>(), Err("expected aiperf, guidellm or vllm".to_owned()));
}

#[test]
fn what_is_saved_is_read_again() {
    for (name, text) in [("t.jsonl", CHATS.to_owned()), ("c.jsonl", SESSIONS.replace('\n', " "))] {
        let trace = parse(name, text);
        let mut out = Vec::new();
        if trace.format.has_sessions() {
            write_sessions(&trace.sessions, &mut out).expect("a vector takes all bytes");
        } else {
            write_csv(&trace.requests, &mut out).expect("a vector takes all bytes");
        }
        let back = parse("saved", &out);
        assert_eq!((back.requests, back.sessions), (trace.requests, trace.sessions));
    }
}
