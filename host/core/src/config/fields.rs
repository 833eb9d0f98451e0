use std::sync::LazyLock;

use serde_json::Value;

use super::schema::{expectation, schema};
use super::{ServiceLevel, defaults, get, joined};

/// What stands for the name of a table that the file names itself, in the paths of [`fields`].
pub const NAMED: &str = "NAME";

/// Fields, or whole tables, of later versions: setting one is an error that explains so.
const NOT_YET: [&str; 3] = ["kv_memory.block_size_bytes", "kv_memory.capacity_bytes", "kv_memory.think_fraction_limit"];

/// Whether the field at a dotted path belongs to a later version.
pub(super) fn is_not_yet(path: &str) -> bool {
    NOT_YET.iter().any(|known| path.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

/// A field of `meridian.toml`.
///
/// ```
/// use meridian_core::config::fields;
///
/// let alpha = fields().iter().find(|field| field.path == "entropy.ema_alpha").unwrap();
/// assert_eq!((alpha.kind.as_str(), alpha.range.as_str()), ("float", "in (0, 1]"));
/// assert_eq!(alpha.default.as_float(), Some(0.1));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Dotted path.
    pub path: String,
    /// Its type in words: `integer`, `"auto" or boolean`.
    pub kind: String,
    /// Its range, to follow "must be"; empty when its type is the only limit.
    pub range: String,
    /// Its default value.
    pub default: toml::Value,
    /// Its meaning.
    pub meaning: String,
}

/// The table and the field of a path below a table that the file names itself.
fn named(path: &str) -> Option<(&str, &str)> {
    path.split_once(&format!(".{NAMED}."))
}

/// The paths of a field, with the names of the tables that a file names itself.
pub(super) fn paths(path: &str, given: &toml::Table) -> Vec<String> {
    let Some((table, rest)) = named(path) else { return vec![path.to_owned()] };
    let names = get(given, table).and_then(toml::Value::as_table);
    names.into_iter().flatten().map(|(name, _)| format!("{}.{rest}", joined(table, name))).collect()
}

/// The paths of the tables that a file names itself.
pub(super) fn named_tables(given: &toml::Table) -> Vec<String> {
    let names = |table| get(given, table).and_then(toml::Value::as_table).into_iter().flatten();
    let tables = fields().iter().filter_map(|field| named(&field.path));
    tables.flat_map(|(table, _)| names(table).map(move |(name, _)| joined(table, name))).collect()
}

/// Give such tables the defaults of the fields that the file leaves out.
pub(super) fn complete(merged: &mut toml::Table) {
    for field in fields() {
        let Some((table, rest)) = named(&field.path) else { continue };
        let Some(toml::Value::Table(tables)) = merged.get_mut(table) else { continue };
        for (_, inner) in tables.iter_mut() {
            if let toml::Value::Table(inner) = inner
                && !inner.contains_key(rest)
            {
                inner.insert(rest.to_owned(), field.default.clone());
            }
        }
    }
}

/// Every field, table by table.
#[must_use]
pub fn fields() -> &'static [Field] {
    static FIELDS: LazyLock<Vec<Field>> = LazyLock::new(|| {
        let mut fields = Vec::new();
        collect(schema(), "", &mut fields);
        fields
    });
    &FIELDS
}

fn default_of(path: &str) -> toml::Value {
    let (table, path) = match named(path) {
        Some((_, rest)) => (toml::Table::try_from(ServiceLevel::default()).expect("defaults are plain TOML"), rest),
        None => (defaults(), path),
    };
    get(&table, path).expect("every field has a default").clone()
}

fn collect(schema: &Value, path: &str, fields: &mut Vec<Field>) {
    if let Some(named) = schema.get("additionalProperties").filter(|inner| inner.is_object()) {
        return collect(named, &format!("{path}.{NAMED}"), fields);
    }
    let Some(inner) = schema["properties"].as_object() else {
        let default = default_of(path);
        fields.push(Field {
            path: path.to_owned(),
            kind: kind(schema),
            range: expectation(schema),
            default,
            meaning: schema["description"].as_str().unwrap_or_default().to_owned(),
        });
        return;
    };
    // A table's own fields before the tables in it.
    let is_table = |field: &Value| field.get("properties").is_some() || field["additionalProperties"].is_object();
    let (tables, leaves): (Vec<_>, Vec<_>) = inner.iter().partition(|(_, field)| is_table(field));
    for (name, field) in leaves.into_iter().chain(tables) {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        collect(field, &path, fields);
    }
}

fn kind(schema: &Value) -> String {
    if let Some(forms) = schema["anyOf"].as_array() {
        return forms.iter().map(kind).collect::<Vec<_>>().join(" or ");
    }
    match schema["type"].as_str() {
        Some("number") => "float".into(),
        Some("object") => "table".into(),
        Some("array") => format!("list of {}s", schema["items"]["type"].as_str().unwrap_or("string")),
        Some("string") if schema.get("const").is_some() => schema["const"].to_string(),
        Some(name) => name.into(),
        // The variants of an enum determine the type.
        None => "string".into(),
    }
}
