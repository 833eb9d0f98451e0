//! `meridian experiment` on an engine of this process, while its own process is told to end.

use std::process::{Command, Stdio};
use std::{fs, thread};

use meridian_core::{Markers, MeridianConfig};
use meridian_engine::{Engine, Settings};
use meridian_fleet::experiment::{Stage, State, Store};
use meridian_fleet::{EngineClient, Member};
use support::meridian;

use crate::support;

fn decides(engine: &EngineClient) -> String {
    engine.status().expect("it answers").slots[0].active.source.clone()
}

#[test]
fn after_sigterm_the_old_policy_decides_and_the_experiment_can_go_on() {
    let folder = std::env::temp_dir().join(format!("meridian-stopped-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("can be made");
    let token = folder.join("token");
    fs::write(&token, "a-token-of-24-characters\n").expect("can be written");
    let private = Command::new("chmod").arg("600").arg(&token).status();
    assert!(private.is_ok_and(|status| status.success()));
    let (address, token) = (format!("unix:{}/engine.sock", folder.display()), token.display().to_string());
    let toml = format!("[admin]\nlisten = \"{address}\"\ntoken_file = \"{token}\"\n");
    let config = MeridianConfig::from_toml(&toml).expect("valid");
    let markers = Markers::new(vec![vec![1]], vec![vec![2]], vec![]).expect("valid");
    let settings = Settings { markers, serve: Some(meridian_admin::serve), ..Settings::default() };
    let _engine = Engine::start(config, settings).expect("it starts");
    let client = EngineClient::at(&address).expect("an address");

    let target = ["--address", &address, "--token-file", &token];
    let start = ["experiment", "start", "native:noop", "--interval", "10m", "--warm-up", "1m", "--pairs", "4"];
    let mut controller = Command::new(env!("CARGO_BIN_EXE_meridian"))
        .args(start)
        .args(target)
        .current_dir(&folder)
        .env("HOME", &folder)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command was built");
    let dir = folder.join("meridian-experiment");
    let state = || -> State { Store::peek(&dir).expect("readable").expect("a state") };
    while !dir.join("state.json").exists() || state().pairs.is_empty() {
        assert!(controller.try_wait().expect("a child").is_none(), "it goes on");
        thread::yield_now();
    }
    let term = Command::new("sh").args(["-c", &format!("kill -TERM {}", controller.id())]).status();
    assert!(term.is_ok_and(|status| status.success()));
    let done = controller.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    let last = said.lines().last().unwrap_or_default();
    assert_eq!(
        last,
        "error: interrupted after 0 pairs: balanced decides again; go on with `meridian experiment resume`, or end it (stop)",
        "{said}"
    );
    assert_eq!((done.status.code(), decides(&client).as_str()), (Some(1), "native:balanced"), "{said}");
    assert_eq!((state().stage, state().restored), (Stage::Running, true));
    let stopped = meridian(&folder, &[&["experiment", "stop"], &target[..]].concat());
    assert_eq!((stopped.code, stopped.stderr.as_str()), (0, ""), "{}", stopped.stdout);
    assert_eq!(state().stage, Stage::Ended { why: "stopped".into(), complete: false });
    let _ = fs::remove_dir_all(&folder);
}
