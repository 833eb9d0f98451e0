//! `meridian config` and `meridian models`: what they print, and how they refuse.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use command::{Done, meridian};

use crate::support as command;

fn json_of(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap()
}

/// A folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A tokenizer with a few whole words and single bytes of ASCII.
fn tokenizer(words: &[(&str, u32)]) -> String {
    let added: Vec<_> = words
        .iter()
        .map(|(word, id)| {
            json!({ "id": id, "content": word, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": false })
        })
        .collect();
    let mut vocabulary: serde_json::Map<_, _> =
        (0x20..0x7f).map(|c: u8| (char::from(c).to_string(), c.into())).collect();
    // An added token keeps its id only when the vocabulary has it.
    vocabulary.extend(words.iter().map(|(word, id)| ((*word).to_owned(), (*id).into())));
    json!({ "version": "1.0", "added_tokens": added, "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": null, "model": { "type": "BPE", "vocab": vocabulary, "merges": [] } })
    .to_string()
}

#[test]
fn check_tells_what_is_wrong_and_what_does_not_act() {
    let folder = folder("check");
    let done = meridian(&folder, &["config", "check"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "ok       no file, the defaults hold\n"));
    let mute = "entropy.probe_suffix: \"\": nothing is probed without it, so EAT ends no thinking; expected the text that \
                leads to an answer, such as \"Final answer: \", or entropy.enabled = false";
    assert_eq!(done.stderr, "");
    std::fs::write(folder.join("meridian.toml"), "[entropy]\neat_max_bits = 0.4\n").unwrap();
    let done = meridian(&folder, &["config", "check"]);
    assert_eq!((done.code, done.stderr), (0, format!("warning: {mute}\n")));
    std::fs::write(folder.join("meridian.toml"), "[kv_memory]\ncapacity_bytes = 8\n").unwrap();
    let done = meridian(&folder, &["config", "check"]);
    assert_eq!((done.code, done.stdout.as_str()), (1, ""));
    assert_eq!(
        done.stderr,
        "error: meridian.toml: kv_memory.capacity_bytes: not in this version, expected no such field\n"
    );
    std::fs::write(folder.join("meridian.toml"), "[policy.budget]\nsource = 'native:deer'\n").unwrap();
    let done = meridian(&folder, &["config", "check", "--json"]);
    assert_eq!(json_of(&done)["warnings"], json!([mute]));
    std::fs::write(folder.join("bad.toml"), "[entropy]\nema_alpha = 2\n").unwrap();
    let done = meridian(&folder, &["config", "check", "bad.toml"]);
    assert_eq!((done.code, done.stdout.as_str()), (1, ""));
    assert_eq!(done.stderr, "error: bad.toml: entropy.ema_alpha: 2: must be in (0, 1]\n");
    let done = meridian(&folder, &["config", "check", "bad.toml", "--json"]);
    assert_eq!((done.code, &json_of(&done)["ok"]), (1, &json!(false)));
}

#[test]
fn check_says_which_service_levels_an_engine_cannot_keep() {
    let folder = folder("levels");
    std::fs::write(folder.join("meridian.toml"), "[service_levels.chat]\nttfo_ms = 5000\nprompt_ms_per_token = 0\n")
        .unwrap();
    let check = |engine: &str| meridian(&folder, &["config", "check", "--engine", engine]);
    let done = check("32b-h200");
    assert_eq!(done.code, 0, "{}", done.stderr);
    let expected =
        "warning: service_levels.chat.prompt_ms_per_token: 0 cannot be kept on 32b-h200: of prompts of over ";
    assert!(done.stderr.starts_with(expected), "{}", done.stderr);
    std::fs::write(folder.join("meridian.toml"), "[service_levels.chat]\n").unwrap();
    let done = check("7b-h100");
    assert_eq!((done.code, done.stderr.as_str()), (0, ""), "a level that can be kept");
    for (engine, expected) in [
        ("9b-h100", "error: --engine 9b-h100: unknown preset, expected one of "),
        ("127.0.0.1:1", "error: --engine 127.0.0.1:1: "),
    ] {
        let done = check(engine);
        assert_eq!(done.code, 1, "{}", done.stderr);
        assert!(done.stderr.starts_with(expected), "{}", done.stderr);
    }
}

#[test]
fn check_refuses_what_the_engine_would() {
    let folder = folder("sources");
    std::fs::create_dir(folder.join("dir.wasm")).unwrap();
    std::fs::write(folder.join("core.wasm"), b"\0asm\x01\0\0\0").unwrap();
    let at = |name: &str| folder.canonicalize().unwrap().join(name).display().to_string();
    for (text, expected) in [
        ("[policy.dispatch]\nsource = 'native:nope'", "\"native:nope\": unknown native policy, expected one of".into()),
        ("[policy.dispatch]\nsource = 'oci://x/y'", "\"oci://x/y\": must end in @sha256:DIGEST".to_owned()),
        ("[policy.dispatch]\nsource = 'missing.wasm'", format!("{}: cannot read it: No such file", at("missing.wasm"))),
        ("[policy.dispatch]\nsource = 'dir.wasm'", format!("{}: not a regular file", at("dir.wasm"))),
        ("[policy.dispatch]\nsource = 'core.wasm'", format!("{}: not a component: ", at("core.wasm"))),
        ("[policy.eviction]\nsource = 'missing.wasm'", format!("{}: cannot read it: No such file", at("missing.wasm"))),
    ] {
        std::fs::write(folder.join("m.toml"), text).unwrap();
        let done = meridian(&folder, &["config", "check", "m.toml"]);
        assert_eq!((done.code, done.stdout.as_str()), (1, ""), "{text}");
        let slot = if text.contains("dispatch") { "dispatch" } else { "eviction" };
        let expected = format!("error: m.toml: policy.{slot}.source: {expected}");
        assert!(done.stderr.starts_with(&expected), "{}", done.stderr);
        assert_eq!(done.stderr.matches('\n').count(), 1, "{}", done.stderr);
        let done = meridian(&folder, &["config", "check", "m.toml", "--json"]);
        assert_eq!((done.code, &json_of(&done)["ok"]), (1, &json!(false)));
    }
    std::fs::write(folder.join("m.toml"), "[policy.dispatch.config]\nx = 1").unwrap();
    let done = meridian(&folder, &["config", "check", "m.toml"]);
    assert!(done.stderr.contains(": policy.dispatch.config: { \"x\" = 1 }: native:balanced refused it: "));
}

/// Names, values and comments of others must not steer the terminal of who reads them.
#[test]
fn nothing_that_is_printed_steers_a_terminal() {
    let folder = folder("terminal");
    let evil = "a\u{1b}]0;b\u{7}\u{9b}2J\u{202e}\u{200b}";
    let file = format!("{evil}.toml");
    let set = |text: &str| std::fs::write(folder.join(&file), text).unwrap();
    let quoted = r#""x\u001b[2J\u009b\u202E\u200b""#;
    let is_safe = |done: &Done| {
        for text in [&done.stdout, &done.stderr] {
            assert!(text.chars().all(|c| c == '\n' || meridian_core::text::is_printable(c)), "{text:?}");
        }
        assert!(done.stderr.matches('\n').count() <= 1, "{}", done.stderr);
    };
    for text in [
        format!("[telemetry]\nservice_name = {quoted}"),
        format!("[telemetry]\nprometheus = {quoted}"),
        format!("[policy.dispatch]\nsource = {quoted}"),
        format!("[policy.dispatch]\nsource = 'p.wasm'\n[policy.dispatch.config]\n{quoted} = {quoted}"),
        format!("[policy]\ntrusted_keys = [{quoted}]"),
        format!("[model]\nfamily = {quoted}"),
        format!("{quoted} = 1"),
        "[scheduler\u{1b}[2J".to_owned(),
    ] {
        set(&text);
        is_safe(&meridian(&folder, &["config", "check", &file]));
        is_safe(&meridian(&folder, &["config", "show", &file]));
    }
    set(&format!("[telemetry]\nservice_name = {quoted}"));
    let shown = meridian(&folder, &["config", "show", &file]);
    let value = shown.stdout.lines().find(|line| line.starts_with("telemetry.service_name")).unwrap();
    assert!(value.contains(r#""x\u001b[2J\U0000009b\U0000202e\U0000200b""#), "what is printed is still TOML: {value}");
    is_safe(&meridian(&folder, &["policy", "check", evil]));
    is_safe(&meridian(&folder, &["bench", "compare", evil, evil]));
    is_safe(&meridian(&folder, &["replay", evil]));
    let usage = meridian(&folder, &["models", "list", "\u{1b}[2J\u{202e}"]);
    assert!(usage.code == 2 && !usage.stderr.contains(['\u{1b}', '\u{202e}']), "{:?}", usage.stderr);
}

/// Opening a pipe would wait for its other end, and a device may have no end.
#[test]
fn only_regular_files_of_a_fitting_size_are_read() {
    let folder = folder("pipes");
    make_pipe(&folder.join("pipe"));
    std::os::unix::fs::symlink("/dev/zero", folder.join("device.wasm")).unwrap();
    std::fs::File::create(folder.join("huge")).unwrap().set_len(1 << 40).unwrap();
    std::fs::write(folder.join("m.toml"), "[policy.dispatch]\nsource = 'device.wasm'").unwrap();
    std::fs::write(folder.join("p.toml"), "[policy.dispatch]\nsource = 'pipe'").unwrap();
    for (args, expected) in [
        (&["config", "check", "pipe"][..], "pipe: cannot be read: not a regular file"),
        (&["config", "check", "/dev/zero"], "/dev/zero: cannot be read: not a regular file"),
        (&["config", "show", "huge"], "huge: is larger than 1 MiB"),
        (&["config", "check", "m.toml"], "device.wasm: not a regular file"),
        (&["config", "check", "p.toml"], "pipe: not a regular file"),
        (&["policy", "check", "pipe"], "pipe: not a regular file"),
        (&["policy", "check", "huge"], "1099511627776 bytes is too large"),
        (&["replay", "pipe"], "pipe: cannot be read: not a regular file"),
        (&["replay", "huge"], "huge: must be at most 268435456 bytes"),
        (&["bench", "compare", "/dev/zero", "pipe"], "/dev/zero: cannot be read: not a regular file"),
        (&["bench", "compare", "huge", "huge"], "huge: is larger than 64 MiB"),
        (&["bench", "report", "pipe"], "pipe: cannot be read: not a regular file"),
        (&["bench", "replay", "--trace", "pipe"], "pipe: cannot be read: not a regular file"),
        (&["bench", "replay", "--trace", "/dev/zero"], "zero: cannot be read: not a regular file"),
        (
            &["bench", "replay", "--trace", "huge", "--format", "azure"],
            "huge: cannot be read: a row has more than 16 MiB",
        ),
        (&["bench", "replay", "--trace", "huge", "--format", "mooncake"], "a line of less than 16 MiB"),
        (&["bench", "calibrate", "huge"], "huge: is larger than 256 MiB"),
        (&["bench", "generate", "--workload", "pipe.toml", "--out", "o.csv"], "pipe.toml: cannot be read: "),
        (&["models", "resolve", "--tokenizer", "pipe"], "pipe: cannot be read: not a regular file"),
    ] {
        let done = meridian(&folder, args);
        assert!(done.code != 0 && done.stdout.is_empty(), "{args:?}: {}", done.stdout);
        assert!(done.stderr.contains(expected), "{args:?}: {}", done.stderr);
        assert_eq!(done.stderr.matches('\n').count(), 1, "{args:?}: {}", done.stderr);
    }
}

fn make_pipe(path: &Path) {
    assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
}

#[test]
fn show_prints_a_file_that_means_the_same() {
    let folder = folder("show");
    std::fs::write(
        folder.join("m.toml"),
        "[model]\nfamily = 'hunyuan-a13b'\n[policy.dispatch]\nsource = 'p.wasm'\nconfig = { a = [1] }\n",
    )
    .unwrap();
    let shown = meridian(&folder, &["config", "show", "m.toml"]);
    assert_eq!((shown.code, shown.stderr.as_str()), (0, ""));
    assert!(shown.stdout.starts_with("# m.toml\n"), "{}", shown.stdout);
    let line = |path: &str| shown.stdout.lines().find(|line| line.starts_with(path)).unwrap().to_owned();
    assert!(line("model.think_start").ends_with("# family:hunyuan-a13b"), "{}", line("model.think_start"));
    assert!(line("policy.dispatch.config").ends_with("# file"));
    assert!(line("scheduler.max_defer_ms").ends_with("# default"));
    assert!(line("scheduler.think_tpot_budget_ms").ends_with("# default"));
    std::fs::write(folder.join("again.toml"), &shown.stdout).unwrap();
    let again = meridian(&folder, &["config", "show", "again.toml", "--json"]);
    let before = meridian(&folder, &["config", "show", "m.toml", "--json"]);
    let values = |done: &Done| -> Vec<(Value, Value)> {
        let fields = json_of(done)["fields"].as_array().unwrap().clone();
        fields.iter().map(|field| (field["field"].clone(), field["value"].clone())).collect()
    };
    assert_eq!(values(&again), values(&before));
    assert!(values(&again).len() > 45);
}

#[test]
fn reference_and_schema_are_printed() {
    let folder = folder("printed");
    let page = meridian(&folder, &["config", "reference"]);
    let committed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/configuration.md");
    assert_eq!(page.stdout, std::fs::read_to_string(committed).unwrap());
    let schema = json_of(&meridian(&folder, &["config", "schema"]));
    assert_eq!(schema["properties"]["scheduler"]["properties"]["max_think_tokens"]["maximum"], 16_777_216);
}

#[test]
fn resolve_compares_ids() {
    let folder = folder("resolve");
    std::fs::write(folder.join("tokenizer.json"), tokenizer(&[("<think>", 151_667), ("</think>", 151_668)])).unwrap();
    let done = meridian(&folder, &["models", "resolve", "--family", "qwen3", "--tokenizer", ".", "--json"]);
    let resolved = json_of(&done);
    assert_eq!((done.code, &resolved["markers"][1]["ids"]), (0, &json!([151_668])), "{resolved}");
    let done = meridian(&folder, &["models", "resolve", "--family", "qwen3.5", "--tokenizer", "tokenizer.json"]);
    assert_eq!((done.code, done.stdout.as_str()), (1, ""));
    assert_eq!(
        done.stderr,
        "error: qwen3.5: \"<think>\": the tokenizer gives [151667], expected [248068]: not a tokenizer of this family\n"
    );
    let done = meridian(&folder, &["models", "resolve", "--family", "qwen", "--tokenizer", "."]);
    assert_eq!(done.code, 1);
    assert!(done.stderr.starts_with("error: --family: \"qwen\": unknown model family, did you mean \"qwen3\""));

    let done = meridian(&folder, &["models", "resolve", "--tokenizer", ".", "--json"]);
    let families = json_of(&done)["families"].as_array().unwrap().clone();
    let fit = |name: &str| families.iter().find(|row| row["family"] == name).unwrap()["fit"].clone();
    assert_eq!(families[0]["family"], "qwen3");
    assert_eq!([fit("qwen3"), fit("step3"), fit("granite"), fit("glm-4.5")], ["fits", "possible", "unclear", "no"]);

    std::fs::write(folder.join("plain.json"), tokenizer(&[])).unwrap();
    let done = meridian(&folder, &["models", "resolve", "--tokenizer", "plain.json"]);
    assert_eq!((done.code, done.stdout.as_str()), (1, ""));
    assert!(done.stderr.contains("plain.json: no known family fits"), "{}", done.stderr);
}

#[test]
fn hostile_tokenizers_get_one_line() {
    let folder = folder("hostile");
    let good = tokenizer(&[("<think>", 1)]);
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.join(name), bytes).unwrap();
    write("empty.json", b"");
    write("list.json", b"[]");
    write("bytes.json", &[0xff; 64]);
    write("deep.json", "[".repeat(1 << 20).as_bytes());
    write("cut.json", &good.as_bytes()[..good.len() / 2]);
    write("merges.json", good.replace("\"merges\":[]", "\"merges\":[\"a b\",\"zz\\nyy q\"]").as_bytes());
    write("model.json", good.replace("\"BPE\"", "\"X\\nY\"").as_bytes());
    let regex = "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(((\"},\"behavior\":\"Isolated\",\"invert\":false}";
    write("regex.json", good.replace("\"pre_tokenizer\":null", regex).as_bytes());
    // The library slices each merged token by the length of the prefix, without a look at the token.
    let merged = good.replace("\"vocab\":{", "\"continuing_subword_prefix\":\"long prefix\",\"vocab\":{\"th\":300,");
    write("prefix.json", merged.replace("\"merges\":[]", "\"merges\":[\"t h\"]").as_bytes());
    // Sparse: no disk is used.
    std::fs::File::create(folder.join("huge.json")).unwrap().set_len((64 << 20) + 1).unwrap();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let done = meridian(&folder, &["models", "resolve", "--tokenizer", &name]);
        assert_eq!((done.code, done.stdout.as_str()), (1, ""), "{name}: {}", done.stderr);
        assert!(done.stderr.starts_with(&format!("error: {name}: ")), "{name}: {}", done.stderr);
        assert_eq!(done.stderr.matches('\n').count(), 1, "{name}: {}", done.stderr);
    }
    let done = meridian(&folder, &["models", "resolve", "--tokenizer", "huge.json"]);
    assert!(done.stderr.contains("is larger than 64 MiB"), "{}", done.stderr);
    let done = meridian(&folder, &["models", "resolve", "--tokenizer", "prefix.json"]);
    assert_eq!(done.stderr, "error: prefix.json: not a tokenizer.json: it contradicts itself\n");
    let done = meridian(&folder, &["models", "resolve", "--tokenizer", "absent"]);
    assert!(done.stderr.starts_with("error: absent: cannot be read: "), "{}", done.stderr);
}

#[test]
fn list_names_every_family() {
    let folder = folder("list");
    let families = json_of(&meridian(&folder, &["models", "list", "--json"]))["families"].as_array().unwrap().clone();
    let text = meridian(&folder, &["models", "list"]).stdout;
    assert_eq!(families.len(), text.lines().count());
    assert!(families.iter().all(|family| text.contains(family["name"].as_str().unwrap())));
    assert!(families.len() >= 20);
}
