use serde::Deserialize;

use crate::inputs::facts;

__lifecycle_targets! {
    facts!
    /// The operator's `[scheduler]` table, as far as policies need it.
    #[derive(Clone, Copy, Debug, PartialEq)]
    Targets {}
}

/// What `lifecycle.init` was given.
#[derive(Clone, Copy, Debug)]
pub struct Init<'a> {
    /// The deployment's targets.
    pub targets: Targets,
    /// The policy's own options, one JSON object.
    pub config_json: &'a str,
}

impl Init<'_> {
    /// Parse the policy's options. Give `C` the attribute `serde(deny_unknown_fields)`, so that a misspelt option is an
    /// error. A policy that reads no options does not pay for the parser: a component with it is three times as large.
    ///
    /// # Errors
    /// One line: the option, its value, and what was expected.
    pub fn config<C: for<'de> Deserialize<'de>>(&self) -> Result<C, String> {
        match serde_json_core::from_str::<C>(self.config_json) {
            Ok((config, _)) => Ok(config),
            Err(error) => {
                let fits = |json: &str| serde_json_core::from_str::<C>(json).is_ok();
                Err(wrong_option(self.config_json, &fits).unwrap_or_else(|| error.to_string()))
            }
        }
    }

    /// For a policy without options.
    ///
    /// # Errors
    /// When the operator gave any.
    pub fn no_config(&self) -> Result<(), String> {
        let is_empty = self.config_json.bytes().all(|byte| byte.is_ascii_whitespace() || byte == b'{' || byte == b'}');
        if is_empty { Ok(()) } else { Err("config: this policy takes no options".into()) }
    }
}

/// Values to try in the place of a wrong one, and what they are.
const TRIALS: [(&str, &str); 7] = [
    ("true", "true or false"),
    ("0.5", "a number"),
    ("-1", "an integer"),
    ("1", "an integer of at least 0 that is not too large"),
    ("\"\"", "a string"),
    ("[]", "a list"),
    ("{}", "a table"),
];

/// The first option that does not fit, found by trying: the parser's own errors name none, and one that does is larger than
/// most policies.
fn wrong_option(json: &str, fits: &dyn Fn(&str) -> bool) -> Option<String> {
    let pairs = pairs(json)?;
    // Where no option has to be given, each is tried alone; else among the others.
    let is_alone = fits("{}");
    let fits_with = |wrong: usize, trial: &str| {
        let mut object = String::from("{");
        for (index, (key, value)) in pairs.iter().enumerate() {
            if index == wrong || !is_alone {
                object.push_str(if object.len() > 1 { "," } else { "" });
                object.push_str(key);
                object.push(':');
                object.push_str(if index == wrong { trial } else { value });
            }
        }
        object.push('}');
        fits(&object)
    };
    for (index, (key, value)) in pairs.iter().enumerate() {
        if is_alone && fits_with(index, value) {
            continue;
        }
        let expected = TRIALS.iter().find(|(trial, _)| fits_with(index, trial)).map(|(_, expected)| *expected);
        if expected.is_none() && !is_alone {
            continue;
        }
        let name = key.trim_matches('"');
        let end = value.char_indices().nth(40).map_or(value.len(), |(end, _)| end);
        let mut text = String::from(name);
        text.push_str(": ");
        text.push_str(&value[..end]);
        text.push_str(if expected.is_some() { ": must be " } else { ": no such option, or not a value of it" });
        text.push_str(expected.unwrap_or_default());
        return Some(text);
    }
    if is_alone { Some("an option is given twice".into()) } else { None }
}

/// Keys, in quotes, and values of one JSON object, as they are written.
fn pairs(json: &str) -> Option<Vec<(&str, &str)>> {
    let mut rest = json.trim().strip_prefix('{')?.strip_suffix('}')?.trim();
    let mut pairs = Vec::new();
    while !rest.is_empty() {
        let (key, after) = rest.split_at(end_of_value(rest, ':')?);
        let after = after.strip_prefix(':')?.trim_start();
        let (value, after) = after.split_at(end_of_value(after, ',').unwrap_or(after.len()));
        pairs.push((key.trim(), value.trim()));
        rest = after.strip_prefix(',').unwrap_or(after).trim_start();
    }
    Some(pairs)
}

/// Where the value at the start of `text` ends: at the first `end` outside of strings, lists and objects.
fn end_of_value(text: &str, end: char) -> Option<usize> {
    let (mut depth, mut in_string, mut is_escaped) = (0_usize, false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if in_string => is_escaped = true,
            '"' => in_string = !in_string,
            _ if in_string => {}
            '[' | '{' => depth += 1,
            ']' | '}' => depth = depth.saturating_sub(1),
            c if c == end && depth == 0 => return Some(at),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default, deny_unknown_fields)]
    struct Options {
        count: u8,
        share: f32,
        exact: bool,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only parsed")]
    struct Required {
        count: u8,
        share: f32,
    }

    fn refused<C: for<'de> Deserialize<'de> + std::fmt::Debug>(config_json: &str) -> String {
        let targets = Targets {
            output_tpot_budget_ms: 20.0,
            think_tpot_budget_ms: 80.0,
            think_batch_multiplier: 2.5,
            max_defer_ms: 2000.0,
        };
        Init { targets, config_json }.config::<C>().expect_err("it does not fit")
    }

    #[test]
    fn a_wrong_option_is_named_with_its_value_and_what_was_expected() {
        for (json, expected) in [
            (r#"{"count": "x"}"#, r#"count: "x": must be an integer of at least 0 that is not too large"#),
            (r#"{"share": 1, "count": 256}"#, "count: 256: must be an integer of at least 0 that is not too large"),
            (r#"{"share": "a, }b\"", "exact": true}"#, r#"share: "a, }b\"": must be a number"#),
            (r#"{"exact": [1, {"a": 2}]}"#, r#"exact: [1, {"a": 2}]: must be true or false"#),
            (r#"{"cuont": 1}"#, "cuont: 1: no such option, or not a value of it"),
            (r#"{"count": 1, "count": 2}"#, "an option is given twice"),
        ] {
            assert_eq!(refused::<Options>(json), expected, "{json}");
        }
    }

    #[test]
    fn options_that_must_be_given_are_named_too() {
        assert_eq!(refused::<Required>(r#"{"count": 1, "share": true}"#), "share: true: must be a number");
        assert!(!refused::<Required>(r#"{"count": 1}"#).is_empty());
        assert!(!refused::<Required>("{").is_empty());
    }
}
