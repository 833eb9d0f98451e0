//! The JSON Schema of `meridian.toml`, and the check of a table against it.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::{MeridianConfig, ServiceLevel, joined, quoted};
use crate::Error;

/// The JSON Schema of `meridian.toml`, for editors.
#[must_use]
pub fn schema() -> &'static Value {
    static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
        let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
        let mut schema = settings.into_generator().into_root_schema_for::<MeridianConfig>().to_value();
        let defaults =
            serde_json::to_value(MeridianConfig::default()).expect("the default configuration is plain JSON");
        settle(&mut schema, &defaults);
        schema["title"] = json!("meridian.toml");
        schema["description"] = json!("Configuration of Meridian.");
        schema
    });
    &SCHEMA
}

/// Tables are closed and require no field; each leaf gets its default at this place.
fn settle(schema: &mut Value, default: &Value) {
    let Some(object) = schema.as_object_mut() else { return };
    object.remove("required");
    object.remove("default");
    describe(object);
    let about = object.get("description").cloned().unwrap_or_default();
    if let Some(named) = object.get_mut("additionalProperties").filter(|named| named.is_object()) {
        // A table that the file names itself has the defaults that its type has.
        settle(named, &serde_json::to_value(ServiceLevel::default()).expect("defaults are plain JSON"));
        named["description"] = about;
        return;
    }
    if let Some(fields) = object.get_mut("properties").and_then(Value::as_object_mut) {
        for (name, field) in fields {
            settle(field, &default[name.as_str()]);
        }
        object.insert("additionalProperties".into(), json!(false));
    } else {
        object.insert("default".into(), default.clone());
    }
}

/// A description is one line.
fn describe(object: &mut Map<String, Value>) {
    if let Some(description) = object.get("description").and_then(Value::as_str) {
        let joined = description.split_whitespace().collect::<Vec<_>>().join(" ");
        object.insert("description".into(), joined.into());
    }
}

/// The schema of the table or field at a dotted path, [`NAMED`](super::NAMED) standing for any name.
pub(super) fn at(path: &str) -> Option<&'static Value> {
    path.split('.').try_fold(schema(), |schema, key| match schema.get("additionalProperties") {
        Some(named) if named.is_object() => Some(named),
        _ => schema.get("properties")?.get(key),
    })
}

/// Check the numbers and the choices of `table`. Serde reports other wrong types, and names them as well.
pub(super) fn check(table: &toml::Table) -> Result<(), Error> {
    check_table(schema(), "", table)
}

fn check_table(schema: &Value, prefix: &str, table: &toml::Table) -> Result<(), Error> {
    for (key, value) in table {
        let named = schema.get("additionalProperties").filter(|named| named.is_object());
        let field = named.unwrap_or(&schema["properties"][key.as_str()]);
        let path = joined(prefix, key);
        match value {
            toml::Value::Table(inner) => check_table(field, &path, inner)?,
            _ if field.get("properties").is_some() || field["additionalProperties"].is_object() => {
                let reason = format!("invalid type: {}, expected a table", value.type_str());
                return Err(Error::ConfigSyntax { field: path, reason });
            }
            _ if accepts(field, value) => {}
            _ => {
                let reason = match value {
                    toml::Value::Float(number) if (*number as f32).is_infinite() && !may_be_infinite(field) => {
                        "must be finite in 32 bits".into()
                    }
                    _ => format!("must be {}", expectation(field)),
                };
                return Err(Error::ConfigValidation { field: path, value: shown(value), reason });
            }
        }
    }
    Ok(())
}

/// The forms that a value may have.
fn forms(schema: &Value) -> &[Value] {
    schema["anyOf"].as_array().map_or(std::slice::from_ref(schema), Vec::as_slice)
}

/// False for a value of the right type that is not allowed.
fn accepts(schema: &Value, value: &toml::Value) -> bool {
    let mut of_its_type = forms(schema).iter().filter(|form| has_type(form, value)).peekable();
    if of_its_type.peek().is_none() {
        // For a choice of texts, serde would report "unit variant".
        return constants(schema).is_empty();
    }
    of_its_type.any(|form| form_accepts(form, value))
}

fn has_type(form: &Value, value: &toml::Value) -> bool {
    match value {
        toml::Value::Integer(_) => form["type"] == "integer" || form["type"] == "number",
        toml::Value::Float(_) => form["type"] == "number",
        toml::Value::String(_) => form["type"] == "string" || form.get("oneOf").is_some(),
        _ => false,
    }
}

fn form_accepts(form: &Value, value: &toml::Value) -> bool {
    let number = match value {
        toml::Value::String(text) => {
            let allowed = constants(form);
            return allowed.is_empty() || allowed.contains(&text.as_str());
        }
        toml::Value::Integer(number) => *number as f64,
        toml::Value::Float(number) => *number,
        _ => return true,
    };
    // The field holds the nearest f32: 1e-60 is 0 there.
    let number = if form["format"] == "float" { f64::from(number as f32) } else { number };
    let Bounds { above, least, most } = Bounds::of(form);
    (number.is_finite() || may_be_infinite(form) && number == f64::INFINITY)
        && above.is_none_or(|bound| number > bound)
        && least.is_none_or(|bound| number >= bound)
        && most.is_none_or(|bound| number <= bound)
}

/// Whether positive infinity is one of the field's values.
pub(super) fn may_be_infinite(field: &Value) -> bool {
    field["x-may-be-infinite"] == true
}

struct Bounds {
    above: Option<f64>,
    least: Option<f64>,
    most: Option<f64>,
}

impl Bounds {
    fn of(form: &Value) -> Self {
        let number = |key: &str| form[key].as_f64();
        Self { above: number("exclusiveMinimum"), least: number("minimum"), most: number("maximum") }
    }
}

/// The allowed texts of a form; none when it accepts any text.
fn constants(form: &Value) -> Vec<&str> {
    let one_of = form["oneOf"].as_array().into_iter().flatten().map(|variant| &variant["const"]);
    let listed = form["enum"].as_array().into_iter().flatten();
    one_of.chain(listed).chain(form.get("const")).filter_map(Value::as_str).collect()
}

/// The range of a field, to follow "must be": `in (0, 1]`, `"auto" or at least 1`; empty when its type is the only
/// limit.
pub(super) fn expectation(schema: &Value) -> String {
    if let Some(words) = schema["x-must-be"].as_str() {
        return words.to_owned();
    }
    let alternatives: Vec<String> = forms(schema).iter().flat_map(form_expectation).collect();
    match alternatives.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        Some((only, _)) => only.clone(),
        None => String::new(),
    }
}

fn form_expectation(form: &Value) -> Vec<String> {
    let constants = constants(form);
    if !constants.is_empty() {
        return constants.into_iter().map(quoted).collect();
    }
    if form["type"] == "boolean" {
        return vec!["true".into(), "false".into()];
    }
    let Bounds { above, least, most } = Bounds::of(form);
    let text = match (above, least, most) {
        (Some(above), _, Some(most)) => format!("in ({above}, {most}]"),
        (Some(above), ..) => format!("above {above}"),
        (None, Some(least), Some(most)) if form["type"] == "integer" => format!("in {least}..={most}"),
        (None, Some(least), Some(most)) => format!("in [{least}, {most}]"),
        (None, Some(least), None) => format!("at least {least}"),
        (None, None, Some(most)) => format!("at most {most}"),
        (None, None, None) => return Vec::new(),
    };
    vec![text]
}

fn shown(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => quoted(text),
        toml::Value::Float(number) if number.abs() >= 1e16 && number.is_finite() => format!("{number:e}"),
        toml::Value::Float(number) => number.to_string(),
        other => other.to_string(),
    }
}
