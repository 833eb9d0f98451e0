use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use meridian_bench::limits::{REQUESTS, within};
use meridian_bench::load::{Course, Stage};
use meridian_bench::trace::{Generator, TraceRequest, write_csv};

use super::input::WorkloadArgs;
use crate::{Unusable, print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
Examples:
  meridian bench generate --workload multi-turn --requests 10000 --out requests.csv
  meridian bench generate --workload reasoning-chat --day 0.6x600,1.6x300,0.6x900 --out day.csv")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Follow this course of factors of the workload's rate, and stop at its end: FACTORxSECONDS, or FROM-TOxSECONDS for a ramp
    #[arg(long, value_name = "STAGE,...", value_delimiter = ',', conflicts_with = "requests")]
    day: Vec<Stage>,
    /// Set the seed of the workload
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the CSV to this file, and replace any existing file
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub(crate) fn run(args: &GenerateArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let (name, workload, mut requests) = args.workload.read().map_err(unusable)?;
    let generator = Generator::new(&workload, args.seed).map_err(|error| unusable(error.into()))?;
    let file =
        std::fs::File::create(&args.out).with_context(|| format!("{}: cannot be written", args.out.display()))?;
    let mut file = BufWriter::new(file);
    if args.day.is_empty() {
        write_csv(generator.take(requests), &mut file)?;
    } else {
        let course = Course::day(args.day.clone());
        within("--day: its requests", course.requests(workload.requests_per_s).ceil() as usize, &REQUESTS)
            .map_err(unusable)?;
        requests = 0;
        let day = generator.map_while(|request| {
            requests += 1;
            Some(TraceRequest { arrival_s: course.time_of(request.arrival_s)?, ..request })
        });
        write_csv(day, &mut file)?;
        requests -= 1;
    }
    file.flush()?;
    let out = args.out.display().to_string();
    if json {
        return print_json(&serde_json::json!({ "ok": true, "out": out, "workload": name, "requests": requests }));
    }
    Ok(print_line(&format!("{out}: {requests} requests of {name}"))?)
}
