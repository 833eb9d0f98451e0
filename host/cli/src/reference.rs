//! docs/src/command-line.md is what `-h` prints for each command. `MERIDIAN_BLESS=1` rewrites it.

use std::fmt::Write;

use clap::{Command, CommandFactory};

use crate::bench::early_exit::EarlyExitArgs;

#[path = "../../core/tests/generated/mod.rs"]
mod generated;

const HEAD: &str = "# Command line

What `-h` prints for each command; `--help` says more of some options. `meridian --version` (`-V`) prints the version.
";

/// A section for each command that does something, in the order of the command line.
fn sections(command: &mut Command, words: &str, page: &mut String) {
    let words = format!("{words} {}", command.get_name()).trim().to_owned();
    let help = command.render_help().to_string();
    let is_shown = |command: &&mut Command| !command.is_hide_set() && command.get_name() != "help";
    let mut inner: Vec<_> = command.get_subcommands_mut().filter(is_shown).collect();
    if inner.is_empty() {
        section(&words, &help, page);
    }
    if words == "meridian bench vllm" {
        section(&format!("{words} --scenario early-exit"), &EarlyExitArgs::command().render_help().to_string(), page);
    }
    for command in &mut inner {
        sections(command, &words, page);
    }
}

fn section(words: &str, help: &str, page: &mut String) {
    let lines: Vec<_> = help.lines().map(str::trim_end).collect();
    writeln!(page, "\n## `{words}`\n\n```text\n{}\n```", lines.join("\n").trim()).expect("a string");
}

#[test]
fn the_committed_page_is_what_h_prints() {
    let mut page = HEAD.to_owned();
    let mut command = super::Cli::command();
    command.build();
    sections(&mut command, "", &mut page);
    generated::assert_committed("docs/src/command-line.md", &page);
}
