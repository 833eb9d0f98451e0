//! python/meridian/_tables.py holds the tables of `meridian.toml` as dataclasses. `MERIDIAN_BLESS=1` rewrites it.

use std::collections::BTreeMap;
use std::fmt::Write;

use generated::assert_committed;
use meridian_core::MeridianConfig;
use meridian_core::config::{NAMED, fields, schema};
use serde_json::Value;

use crate::generated;

const HEAD: &str = "\
# Written by `MERIDIAN_BLESS=1 cargo test --release -p meridian-core --test all python_tables` from the native tables.
\"\"\"The tables of `meridian.toml`. docs/src/configuration.md describes each field.\"\"\"

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal
";

#[test]
fn the_committed_classes_are_the_generated_ones() {
    assert_committed("python/meridian/_tables.py", &python_tables());
}

/// A class: its name, the tables that have its fields, and those fields.
struct Class {
    name: String,
    about: String,
    tables: Vec<String>,
    fields: Vec<String>,
}

fn python_tables() -> String {
    let types = schemars::schema_for!(MeridianConfig).to_value();
    let none = toml::Value::Table(toml::Table::new());
    let mut defaults: BTreeMap<&str, &toml::Value> =
        fields().iter().map(|field| (field.path.as_str(), &field.default)).collect();
    // Tables that the file names itself: there is none by default.
    let named = fields().iter().filter_map(|field| field.path.split_once(&format!(".{NAMED}.")));
    defaults.extend(named.map(|(table, _)| (table, &none)));
    let mut classes = Vec::new();
    collect(&types, &types, "Tables", "", &mut classes);
    let mut page = HEAD.to_owned();
    for class in &classes {
        // Fields are in the order of the alphabet, which nobody should have to know; what every use gives comes first.
        let (defaulted, given): (Vec<_>, Vec<_>) = class
            .fields
            .iter()
            .partition(|field| !is_leaf(class, field, &classes) || shared(class, field, &defaults).is_some());
        let by_name = if given.is_empty() { ", kw_only=True" } else { "" };
        let _ = write!(page, "\n\n@dataclass(frozen=True{by_name})\nclass {}:\n", class.name);
        let _ = writeln!(page, "    \"\"\"{}\"\"\"\n", class.about);
        for name in given.into_iter().chain(defaulted) {
            let _ = writeln!(page, "    {}", declaration(class, name, &classes, &defaults));
        }
    }
    page
}

/// Append the class of a table, after those of the tables in it.
fn collect(types: &Value, table: &Value, name: &str, path: &str, classes: &mut Vec<Class>) {
    let fields: Vec<String> = table["properties"].as_object().unwrap().keys().cloned().collect();
    for field in &fields {
        let Some(of) = table["properties"][field]["$ref"].as_str().and_then(|at| at.strip_prefix("#/$defs/")) else {
            continue;
        };
        let inner = &types["$defs"][of];
        if inner.get("properties").is_some() {
            collect(types, inner, of, &joined(path, field), classes);
        }
    }
    if let Some(class) = classes.iter_mut().find(|class| class.name == name) {
        class.tables.push(path.to_owned());
        return;
    }
    let about = table["description"].as_str().unwrap().split("\n\n").next().unwrap().replace('\n', " ");
    let about = if about.ends_with('.') { about } else { format!("{about}.") };
    classes.push(Class { name: name.to_owned(), about, tables: vec![path.to_owned()], fields });
}

fn joined(path: &str, field: &str) -> String {
    if path.is_empty() { field.to_owned() } else { format!("{path}.{field}") }
}

fn declaration(class: &Class, field: &str, classes: &[Class], defaults: &BTreeMap<&str, &toml::Value>) -> String {
    let path = joined(&class.tables[0], field);
    if let Some(inner) = classes.iter().find(|inner| inner.tables.contains(&path)) {
        let given = arguments(inner, &path, classes, defaults);
        let default = if given.is_empty() { inner.name.clone() } else { format!("lambda: {}({given})", inner.name) };
        return format!("{field}: {} = field(default_factory={default})", inner.name);
    }
    let kind = kind(schema().pointer(&format!("/properties/{}", path.replace('.', "/properties/"))).unwrap());
    match shared(class, field, defaults) {
        Some(default) => format!("{field}: {kind} = {}", literal(&kind, default)),
        None => format!("{field}: {kind}"),
    }
}

fn is_leaf(class: &Class, field: &str, classes: &[Class]) -> bool {
    let path = joined(&class.tables[0], field);
    !classes.iter().any(|inner| inner.tables.contains(&path))
}

/// What the table at `path` gives its class: the defaults that the class does not have.
fn arguments(class: &Class, path: &str, classes: &[Class], defaults: &BTreeMap<&str, &toml::Value>) -> String {
    let given = class.fields.iter().filter(|field| is_leaf(class, field, classes)).filter_map(|field| {
        let default = defaults[joined(path, field).as_str()];
        match shared(class, field, defaults) {
            Some(shared) if shared == default => None,
            Some(_) => Some(format!("{field}={}", literal("", default))),
            None => Some(literal("", default)),
        }
    });
    let (named, first): (Vec<String>, Vec<String>) = given.partition(|text| text.contains('='));
    first.into_iter().chain(named).collect::<Vec<_>>().join(", ")
}

/// The default that most of a class's tables have; none if each has its own.
fn shared<'a>(class: &Class, field: &str, defaults: &BTreeMap<&str, &'a toml::Value>) -> Option<&'a toml::Value> {
    let all: Vec<_> = class.tables.iter().map(|table| defaults[joined(table, field).as_str()]).collect();
    let uses = |value: &toml::Value| all.iter().filter(|other| **other == value).count();
    let most = all.iter().copied().max_by_key(|value| uses(value)).unwrap();
    (all.len() == 1 || uses(most) > 1).then_some(most)
}

/// The Python type of a field.
fn kind(form: &Value) -> String {
    if let Some(forms) = form["anyOf"].as_array() {
        // `Literal` last, as in `bool | Literal["auto"]`.
        let mut kinds: Vec<String> = forms.iter().map(kind).collect();
        kinds.sort_by_key(|kind| kind.starts_with("Literal"));
        return kinds.join(" | ");
    }
    let variants = form["oneOf"].as_array().into_iter().flatten().map(|variant| &variant["const"]);
    let listed = form["enum"].as_array().into_iter().flatten();
    let constants: Vec<String> = variants
        .chain(listed)
        .chain(form.get("const"))
        .filter(|value| value.is_string())
        .map(Value::to_string)
        .collect();
    if !constants.is_empty() {
        return format!("Literal[{}]", constants.join(", "));
    }
    match form["type"].as_str().unwrap() {
        "string" => "str",
        "integer" => "int",
        "number" => "float",
        "boolean" => "bool",
        "array" => "list[str]",
        "object" => "dict[str, Any]",
        other => panic!("no Python type for {other}"),
    }
    .to_owned()
}

fn literal(kind: &str, value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => serde_json::to_string(text).unwrap(),
        toml::Value::Integer(number) if kind == "float" => format!("{number}.0"),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) if number.is_infinite() => "math.inf".into(),
        toml::Value::Float(number) => format!("{number:?}"),
        toml::Value::Boolean(true) => "True".into(),
        toml::Value::Boolean(false) => "False".into(),
        toml::Value::Array(items) if items.is_empty() && kind.starts_with("list") => {
            "field(default_factory=list)".into()
        }
        toml::Value::Array(items) if items.is_empty() => "()".into(),
        toml::Value::Table(items) if items.is_empty() => "field(default_factory=dict)".into(),
        other => panic!("no Python literal for {other}"),
    }
}
