use std::sync::LazyLock;

use serde_json::Value;

use super::schema::{expectation, schema};
use super::{defaults, get};

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

fn collect(schema: &Value, path: &str, fields: &mut Vec<Field>) {
    let Some(inner) = schema["properties"].as_object() else {
        let default = get(&defaults(), path).expect("every field has a default").clone();
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
    let (tables, leaves): (Vec<_>, Vec<_>) = inner.iter().partition(|(_, field)| field.get("properties").is_some());
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
        Some("array") => "list of strings".into(),
        Some("string") if schema.get("const").is_some() => schema["const"].to_string(),
        Some(name) => name.into(),
        // The variants of an enum determine the type.
        None => "string".into(),
    }
}
