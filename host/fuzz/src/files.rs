//! The files of fleets: a fleet file, the folder of a roll-out, that of an experiment, and a prediction. Each is read, or
//! refused in one line; what was read can be gone on with, and shown.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use meridian_fleet::experiment::{Report, Store};
use meridian_fleet::rollout::{Clock, RolloutState, Roster, reopen};
use meridian_fleet::{Fleet, Member, Prediction};

/// A fleet of which nothing is left.
struct Gone;

impl Roster for Gone {
    fn members(&self) -> Result<Vec<Arc<dyn Member>>, String> {
        Ok(Vec::new())
    }
}

impl Clock for Gone {
    fn now_s(&self) -> f64 {
        1e9
    }

    fn wait(&self, seconds: f64) -> f64 {
        seconds
    }
}

/// Read `data`, whose first byte says as which file: `F`, `R`, `E` or `P`.
pub fn run(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("meridian-fuzz-files-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        folder
    });
    match kind {
        b'F' => fleet(&write(folder, "fleet.toml", data)),
        b'R' => rollout(folder, data),
        b'E' => experiment(folder, data),
        b'P' => prediction(&write(folder, "predicted.json", data)),
        _ => {}
    }
}

fn write(folder: &Path, name: &str, data: &[u8]) -> PathBuf {
    let path = folder.join(name);
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(true).write(true).mode(0o600).open(&path);
    file.and_then(|mut file| file.write_all(data)).expect("a file");
    path
}

fn fleet(path: &Path) {
    match Fleet::from_file(path) {
        Ok(fleet) => fleet.engines.iter().for_each(|engine| crate::assert_one_line(engine.name())),
        Err(error) => crate::assert_one_line(&error.to_string()),
    }
}

/// A state, and after a line of `--` its measurements.
fn rollout(folder: &Path, data: &[u8]) {
    const BETWEEN: &[u8] = b"\n--\n";
    let at = data.windows(BETWEEN.len()).position(|window| window == BETWEEN).unwrap_or(data.len());
    write(folder, "state.json", &data[..at]);
    write(folder, "intervals.jsonl", data.get(at + BETWEEN.len()..).unwrap_or_default());
    let told = &mut |_: &RolloutState| {};
    match reopen(folder, &Gone, &Gone, told) {
        Ok(mut rollout) => {
            rollout.abort();
            rollout.run().expect("the folder can be written");
            assert!(rollout.state().outcome().is_some(), "no engine is left to wait for");
        }
        Err(error) => crate::assert_one_line(&error.to_string()),
    }
}

fn experiment(folder: &Path, data: &[u8]) {
    write(folder, "state.json", data);
    match Store::peek(folder) {
        Ok(state) => {
            let report = Report::of(&state.expect("a file"));
            serde_json::to_string(&report).expect("plain data");
        }
        Err(error) => crate::assert_one_line(&error.to_string()),
    }
}

fn prediction(path: &Path) {
    if let Err(error) = Prediction::read(path) {
        crate::assert_one_line(&error.to_string());
    }
}
