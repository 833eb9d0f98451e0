//! `meridian handoff`: one address before an engine that thinks and engines that answer.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream as Signal;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use meridian_core::config::HandoffPolicyName;
use meridian_core::text::printable;
use meridian_engine::otlp::Traces;
use meridian_engine::{config_file, private};
use meridian_fleet::{ClientLimits, Endpoint, Handoff, HandoffError, HandoffSettings};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::register_conditional_shutdown;
use signal_hook::low_level::pipe;
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::oneshot;

use crate::experiment::seconds;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
All engines need the same model and --kv-transfer-config with HandoffConnector of meridian.vllm.handoff. A request
thinks in the first engine. At the end of its thinking, an engine that answers pulls its KV blocks and writes the answer.
Requests that one engine must serve, and all other paths, go to the first engine. If the other one fails, the first
one goes on from the tokens so far. GET /metrics counts all of it.

The front sends the key of --api-key-file, or of the variable VLLM_API_KEY, with its own requests: /tokenize at the start,
and /health. The keys of clients pass to all engines.

Policies: threshold hands over every request with enough KV blocks, to the engine with the fewest answers. expected-time
measures how long answers take here and there, and hands over those that are expected to end sooner.

Exit code: 1 the engine that thinks does not answer, the address is taken, or requests outlast --shutdown-timeout, 2 bad
input, 130 Ctrl-C, 143 a second SIGTERM, or one with --shutdown-timeout 0.

Example:
  meridian handoff --think http://127.0.0.1:8001 --answer http://127.0.0.1:8002 --listen 127.0.0.1:8000
  meridian handoff --think http://127.0.0.1:8001 --answer http://127.0.0.1:8002 --answer http://127.0.0.1:8003 \
    --policy expected-time")]
pub(crate) struct HandoffArgs {
    /// Let this engine think: http://IP:port on loopback, or https://HOST:port
    #[arg(long, value_name = "URL", value_parser = engine)]
    think: Endpoint,
    /// Let this engine answer: http://IP:port on loopback, or https://HOST:port; may be given several times
    #[arg(long, value_name = "URL", value_parser = engine, required = true)]
    answer: Vec<Endpoint>,
    /// Listen on this address, on loopback
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8000", value_parser = loopback)]
    listen: SocketAddr,
    /// End thinking at this text, one token; by default, model.think_end of the configuration
    #[arg(long, value_name = "TEXT")]
    think_end: Vec<String>,
    /// Keep requests with fewer KV blocks in the first engine; by default, disagg.offload_threshold_blocks
    #[arg(long, value_name = "BLOCKS")]
    threshold_blocks: Option<u32>,
    /// Choose requests and engines by this policy: threshold, expected-time; by default, disagg.policy
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    policy: Option<HandoffPolicyName>,
    /// Give an engine up that is silent for this long while it answers
    #[arg(long, value_name = "TIME", value_parser = seconds, default_value = "60s")]
    patience: f64,
    /// Read the engines' key from this file, which no other user may read; by default, VLLM_API_KEY
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// After SIGTERM, let running requests end for this long; 0 aborts them, as vLLM's option does
    #[arg(long, value_name = "TIME", value_parser = whole_seconds, default_value = "60s")]
    shutdown_timeout: f64,
    /// Read this meridian.toml; by default, the file that an engine started here would read
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub(crate) fn engine(text: &str) -> Result<Endpoint, String> {
    let expected = "must be http://IP:port on loopback, or https://HOST:port";
    let address = text.strip_prefix("http://").map(|address| address.trim_end_matches('/'));
    match (address, text.starts_with("https://")) {
        (Some(address), _) if address.starts_with("unix:") => Err(expected.into()),
        (Some(address), _) => Endpoint::parse(address).map_err(|_| expected.into()),
        (None, true) => Endpoint::parse(text).map_err(Into::into),
        (None, false) => Err(expected.into()),
    }
}

fn policy(text: &str) -> Result<HandoffPolicyName, String> {
    let named = HandoffPolicyName::ALL.into_iter().find(|policy| policy.label() == text);
    let all = HandoffPolicyName::ALL.map(HandoffPolicyName::label);
    named.ok_or_else(|| format!("must be one of {}", all.join(", ")))
}

fn loopback(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|_| "must be IP:port, such as 127.0.0.1:8000")?;
    if address.ip().is_loopback() {
        Ok(address)
    } else {
        Err("must be on loopback; other machines need a proxy with TLS".into())
    }
}

/// A time, or seconds as vLLM has them.
fn whole_seconds(text: &str) -> Result<f64, String> {
    text.parse::<u32>().map(f64::from).or_else(|_| seconds(text))
}

/// Longest file of a key, bytes.
const MAX_KEY_FILE_BYTES: usize = 16 << 10;

/// The key of this file, or else of the environment.
fn key(file: Option<&Path>) -> anyhow::Result<Option<String>> {
    let Some(file) = file else {
        let Some(key) = std::env::var_os("VLLM_API_KEY").filter(|key| !key.is_empty()) else { return Ok(None) };
        return visible(key.as_encoded_bytes()).context("VLLM_API_KEY").map(Some);
    };
    let named = || format!("--api-key-file: {}", file.display());
    let bytes = private::read(file, MAX_KEY_FILE_BYTES).map_err(anyhow::Error::msg).with_context(named)?;
    visible(&bytes).with_context(named).map(Some)
}

/// The text is never shown.
fn visible(key: &[u8]) -> anyhow::Result<String> {
    let key = key.trim_ascii();
    anyhow::ensure!(
        !key.is_empty() && key.iter().all(u8::is_ascii_graphic),
        "{} bytes, must be one key of visible ASCII characters",
        key.len()
    );
    Ok(key.iter().copied().map(char::from).collect())
}

pub(crate) fn run(args: &HandoffArgs, json: bool) -> anyhow::Result<()> {
    let config = config_file::load(args.config.as_deref()).context(Unusable)?.parsed.config;
    let given = Some(&args.think_end).filter(|texts| !texts.is_empty());
    let think_end = given.map_or_else(|| config.model.think_end.or("</think>"), Clone::clone);
    let name = args.policy.unwrap_or(config.disagg.policy);
    let settings = HandoffSettings {
        think: args.think.clone(),
        answer: args.answer.clone(),
        think_end,
        policy: name.policy(args.threshold_blocks.unwrap_or(config.disagg.offload_threshold_blocks)),
        patience: Duration::try_from_secs_f64(args.patience).context("--patience").context(Unusable)?,
        limits: ClientLimits::default(),
        traces: match Traces::start(&config.telemetry, "", None) {
            // Variables that others set for every process turn traces off, as in an engine.
            Err(why) if config.telemetry.otlp_endpoint.is_empty() => {
                say(&format!("warning: {why}"));
                None
            }
            traces => traces.map_err(anyhow::Error::msg).context(Unusable)?,
        },
        api_key: key(args.api_key_file.as_deref()).context(Unusable)?,
    };
    let shutdown_timeout =
        Duration::try_from_secs_f64(args.shutdown_timeout).context("--shutdown-timeout").context(Unusable)?;
    let ends: Vec<String> = settings.think_end.iter().map(|text| format!("{text:?}")).collect();
    // In the wheel, Python would keep Ctrl-C for itself.
    let at_once = Arc::new(AtomicBool::new(true));
    register_conditional_shutdown(SIGINT, 130, Arc::new(AtomicBool::new(true)))?;
    register_conditional_shutdown(SIGTERM, 143, Arc::clone(&at_once))?;
    let (terminated, on_sigterm) = Signal::pair()?;
    pipe::register(SIGTERM, on_sigterm)?;
    terminated.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(async {
        let front = match Handoff::prepare(settings, say).await {
            Err(HandoffError::NoMarker) => {
                return Err(
                    anyhow::anyhow!("--think-end or model.think_end: {}", HandoffError::NoMarker).context(Unusable)
                );
            }
            Err(error @ HandoffError::Marker { .. }) => return Err(anyhow::Error::from(error).context(Unusable)),
            Err(error @ HandoffError::Key { .. }) => {
                return Err(anyhow::anyhow!("--api-key-file or VLLM_API_KEY: {error}").context(Unusable));
            }
            front => front?,
        };
        let listener = TcpListener::bind(args.listen).await;
        let listener = listener.with_context(|| format!("--listen: {}: cannot listen", args.listen))?;
        let address = listener.local_addr()?;
        if json {
            print_json(&json!({ "ok": true, "listen": address.to_string(), "think_end_tokens": front.markers() }))?;
        } else {
            print_line(&format!("listening on {address}; thinking ends at {}", printable(&ends.join(" or "))))?;
        }
        let terminated = UnixStream::from_std(terminated)?;
        at_once.store(shutdown_timeout.is_zero(), Ordering::Relaxed);
        let (stops, stopped) = oneshot::channel();
        let stop = async {
            let _ = terminated.readable().await;
            at_once.store(true, Ordering::Relaxed);
            let _ = stops.send(());
        };
        let time_is_up = async {
            let _ = stopped.await;
            tokio::time::sleep(shutdown_timeout).await;
        };
        tokio::select! {
            () = front.serve(listener, stop) => Ok(()),
            () = time_is_up => anyhow::bail!("--shutdown-timeout: requests still run after {} s", args.shutdown_timeout),
        }
    });
    // The system may still look up a name, and nothing ends that.
    runtime.shutdown_background();
    served
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        assert!(engine("http://127.0.0.1:8001").is_ok());
        assert!(engine("http://127.0.0.1:8001/").is_ok());
        assert!(engine("https://engine.example:8001").is_ok());
        for wrong in ["127.0.0.1:8001", "http://10.0.0.7:8001", "http://unix:/x", "http://", "ftp://127.0.0.1:1"] {
            assert!(engine(wrong).is_err(), "{wrong}");
        }
        assert!(loopback("[::1]:0").is_ok());
        assert!(loopback("0.0.0.0:8000").is_err());
    }
}
