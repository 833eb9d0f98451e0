//! Chooses thresholds for a model of your own: the setting of each rule that recorded thoughts choose.
//!
//!     choose_exit RECORDING.json
//!
//! docs/src/thinking.md says how to record, and what to confirm afterwards.

use anyhow::bail;
use meridian_bench::exit::{ChoiceMargins, ExitFamily, ExitRecording, choose, no_limit};

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file] = arguments.as_slice() else { bail!("usage: choose_exit RECORDING.json") };
    let thoughts = ExitRecording::read(file.as_ref())?.thoughts;
    let natural = no_limit(&thoughts);
    let (right, tokens) = (100.0 * natural.accuracy(), natural.mean_tokens());
    println!("no limit: {right:.1} % right, {tokens:.1} think tokens, {} thoughts", thoughts.len());
    for family in ExitFamily::ALL {
        let found = choose(&family.rules(), &thoughts, ChoiceMargins::default())?;
        let (right, tokens) = (100.0 * found.accuracy, found.tokens);
        let margin = if found.within_margin { "" } else { ", none within the margin" };
        println!("{}: {right:.1} % right, {tokens:.1} think tokens{margin}: {:?}", family.title(), found.rule);
    }
    Ok(())
}
