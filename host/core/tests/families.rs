//! models/*.toml: every file is bundled and valid, and a wrong one is named.

use std::collections::BTreeSet;
use std::path::Path;

use meridian_core::{MeridianConfig, ModelFamily};

const VALID: &str = "name = 'x'\nmodels = ['m']\nstart_in_prompt = 'never'\nevidence = 'e'\n\
    [[start]]\ntext = '<t>'\n[[end]]\ntext = '</t>'\nids = [1, 2]\n";

fn refusal(text: &str) -> String {
    ModelFamily::from_toml("models/x.toml", text).expect_err("the text is wrong").to_string()
}

#[test]
fn every_file_is_bundled_and_can_be_chosen() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let stems = files.filter(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let files: BTreeSet<_> = stems.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
    let bundled: Vec<_> = ModelFamily::all().iter().map(|family| family.name.clone()).collect();
    assert!(bundled.is_sorted());
    assert_eq!(files, bundled.iter().cloned().collect());
    for family in ModelFamily::all() {
        let text = format!("[model]\nfamily = '{}'", family.name);
        let model = MeridianConfig::from_toml(&text).unwrap_or_else(|error| panic!("{error}")).model;
        let texts: Vec<_> = family.start.iter().map(|marker| marker.text.clone()).collect();
        assert_eq!(model.think_start.as_slice(), texts);
        assert_eq!(model.tool_call.as_slice(), family.tool_call);
        assert_eq!(model.resumes, family.resumes.unwrap_or(true));
        // What is not known must not cost the blocks that a later turn reads.
        assert_eq!(model.strips_reasoning_or_keep(), family.strips_reasoning.unwrap_or(false));
        let text = format!("{text}\nstrips_reasoning = 'auto'");
        let model = MeridianConfig::from_toml(&text).unwrap().model;
        assert_eq!(model.strips_reasoning_or_keep(), family.strips_reasoning.unwrap_or(false));
        let model = MeridianConfig::from_toml(&text.replace("'auto'", "true")).unwrap().model;
        assert!(model.strips_reasoning_or_keep());
    }
}

#[test]
fn a_wrong_file_is_refused_with_its_name_and_the_field() {
    assert!(ModelFamily::from_toml("models/x.toml", VALID).is_ok());
    for (from, to, expected) in [
        ("'x'", "'y'", "models/x.toml: name: \"y\": must be the name of the file"),
        ("'x'", "'X'", "models/x.toml: name: must be of a-z, 0-9, - and ."),
        ("['m']", "[]", "models/x.toml: models: must name a model"),
        ("'never'", "'maybe'", "models/x.toml: start_in_prompt: unknown variant `maybe`"),
        ("'e'", "''", "models/x.toml: evidence: must not be empty"),
        ("'e'", "'e'\nstrip = 1", "models/x.toml: strip: unknown field `strip`"),
        ("'e'", "'e'\nparsers = 'p'", "models/x.toml: parsers: invalid type: string"),
        ("'e'", "'e'\nparsers = ['p', '']", "models/x.toml: parsers[1]: must be of a-z, 0-9 and _"),
        ("'e'", "'e'\nparsers = ['P']", "models/x.toml: parsers[0]: must be of a-z, 0-9 and _"),
        ("'e'", "'e'\nparsers = ['p', 'p']", "models/x.toml: parsers[1]: must differ from every other parser"),
        (
            "'e'",
            "'e'\nparsers = ['1', '2', '3', '4', '5', '6', '7', '8', '9']",
            "models/x.toml: parsers: must hold at most 8 names",
        ),
        ("'e'", "'e'\nforce_phrase = 'stop'", "models/x.toml: force_phrase: must contain the text of an end marker"),
        ("'e'", "'e'\ntool_call = ['']", "models/x.toml: tool_call[0]: must have 1 to 256 bytes"),
        ("'e'", "'e'\ntool_call = ['<c>', '</t>']", "models/x.toml: tool_call[1]: must differ from every other marker"),
        ("'e'", "'e'\ntool_call = '<c>'", "models/x.toml: tool_call: invalid type: string"),
        (
            "'e'",
            "'e'\ntool_call = ['1', '2', '3', '4', '5', '6', '7', '8', '9']",
            "models/x.toml: tool_call: must hold at most 8 texts",
        ),
        ("'<t>'", "''", "models/x.toml: start[0].text: must have 1 to 256 bytes"),
        ("'</t>'", "'<t>'", "models/x.toml: end[0].text: must differ from every other marker"),
        ("[1, 2]", "[-1]", "models/x.toml: end[0].ids[0]: "),
        ("[1, 2]", "[1, 2, 3, 4, 5]", "models/x.toml: end[0].ids: must not be more than the bytes of the text"),
        ("[[start]]", "[[start]", "models/x.toml: line 5, column "),
    ] {
        let message = refusal(&VALID.replacen(from, to, 1));
        assert!(message.starts_with(expected), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
}

#[test]
fn a_family_that_strips_old_reasoning_says_what_begins_a_tool_call() {
    let of = |name: &str| ModelFamily::find(name).unwrap().tool_call.clone();
    assert_eq!(of("qwen3"), ["<tool_call>"]);
    assert_eq!(of("deepseek-r1"), ["<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>"]);
    assert!(of("minimax-m2").is_empty(), "it keeps old reasoning");
    assert!(ModelFamily::from_toml("models/x.toml", VALID).unwrap().tool_call.is_empty());
}

#[test]
fn a_parser_of_vllm_belongs_to_one_family() {
    let parsers: Vec<_> = ModelFamily::all().iter().flat_map(|family| &family.parsers).collect();
    assert_eq!(parsers.len(), parsers.iter().collect::<BTreeSet<_>>().len(), "{parsers:?}");
    let of = |name: &str| ModelFamily::find(name).unwrap().parsers.clone();
    assert_eq!(of("gpt-oss"), ["openai_gptoss"]);
    assert_eq!(of("minimax-m2"), ["minimax_m2", "minimax_m2_append_think"]);
    assert!(of("deepseek-r1").is_empty(), "several parsers share its texts, and each names them");
    assert!(ModelFamily::from_toml("models/x.toml", VALID).unwrap().parsers.is_empty());
}

#[test]
fn what_is_forced_on_gpt_oss_is_a_complete_message() {
    let family = ModelFamily::find("gpt-oss").unwrap();
    let ends: Vec<_> = family.end.iter().map(|marker| marker.text.as_str()).collect();
    assert_eq!(ends[0], "<|end|>");
    assert_eq!(family.force_phrase, ends.concat());
}

#[test]
fn an_unknown_name_gets_a_suggestion_and_the_list() {
    let message = ModelFamily::find("Qwen-3").unwrap_err().to_string();
    assert!(message.starts_with("\"Qwen-3\": unknown model family, did you mean \"qwen3\", expected"), "{message}");
    let message = ModelFamily::find("llama").unwrap_err().to_string();
    assert!(message.starts_with("\"llama\": unknown model family, expected one of cohere-command, "), "{message}");
    assert!(message.ends_with(", step3"));
    assert!(ModelFamily::find(&"x".repeat(1 << 20)).is_err());
}
