use serde::Deserialize;

/// The operator's `[scheduler]` table, as far as policies need it; `wit/lifecycle.wit` documents each field.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // documented in wit/lifecycle.wit, the one place
pub struct Targets {
    pub output_tpot_budget_ms: f32,
    pub think_tpot_budget_ms: f32,
    pub think_batch_multiplier: f32,
    pub max_defer_ms: f32,
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
    /// One line that says what did not parse.
    pub fn config<C: for<'de> Deserialize<'de>>(&self) -> Result<C, String> {
        match serde_json_core::from_str::<C>(self.config_json) {
            Ok((config, _)) => Ok(config),
            Err(error) => Err(error.to_string()),
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
