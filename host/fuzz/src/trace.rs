//! Traces: any bytes are read or refused in one line, by every reader; what was read is written and read again.

use meridian_bench::trace::{
    Format, ReadOptions, Summary, TokenCount, Tool, Trace, read_from, write_csv, write_for, write_sessions,
};

/// Most tokens of prompts that are written in blocks: a number of ten million is short, its blocks are not.
const MOST_WRITTEN: u64 = 1 << 20;

/// Read `data` as the format that its content has, and as every other one.
pub fn run(data: &[u8]) {
    let columns = "arrival=timestamp,prompt=input_length,output=output_length,session=session_id,blocks=hash_ids";
    let columns = columns.parse().expect("columns");
    let count =
        Some(TokenCount::new(|text| if text.contains('!') { Err("no \n word".into()) } else { Ok(text.len()) }));
    let options = ReadOptions { limit: Some(1000), count, ..ReadOptions::default() };
    for format in std::iter::once(None).chain(Format::ALL.map(Some)) {
        let columns = (format == Some(Format::Columns)).then_some(&columns).cloned();
        match read_from("trace", data, format, &ReadOptions { columns, ..options.clone() }) {
            Ok(trace) => write(&trace),
            Err(error) => crate::assert_one_line(&error.to_string()),
        }
    }
}

fn write(trace: &Trace) {
    let summary = Summary::of(trace);
    assert!(summary.requests > 0 && (0.0..=1.0).contains(&summary.reuse), "{summary:?}");
    let mut out = Vec::new();
    if trace.format.has_sessions() {
        write_sessions(&trace.sessions, &mut out).expect("a vector takes all bytes");
    } else {
        write_csv(&trace.requests, &mut out).expect("a vector takes all bytes");
    }
    let back = read_from("saved", out.as_slice(), None, &ReadOptions::default()).expect("what was written");
    assert_eq!(back.requests, trace.requests);
    if summary.prompt.sum <= MOST_WRITTEN && !trace.format.has_sessions() {
        // Blocks of several sizes have no place in a file of one.
        let _ = write_for(Tool::Aiperf, &trace.requests, &mut Vec::new());
    }
}
