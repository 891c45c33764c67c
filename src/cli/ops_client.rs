//! Asks the running process what only it knows, through its ops API.
//!
//! Refuses to follow redirects or proxies: the token goes to `ops.listen` and nowhere else.

use std::time::Duration;

use secrecy::ExposeSecret;
use serde::de::DeserializeOwned;

use super::CommandError;
use crate::config::Config;

const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// How long a process is looked for.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Reads one resource of the ops API; `None` when there is no running process to ask.
///
/// # Errors
/// In words for the terminal: its own refusal, or no answer from one that is there.
pub async fn get_if_running<T: DeserializeOwned>(config: &Config, path: &str) -> Result<Option<T>, CommandError> {
    let Some(address) = config.ops.listen else { return Ok(None) };
    let reached = tokio::time::timeout(LOOK_MAX, tokio::net::TcpStream::connect(address)).await;
    match reached {
        Ok(Ok(_)) => get(config, path).await.map(Some),
        _ => Ok(None),
    }
}

/// Reads one resource of the ops API.
///
/// # Errors
/// In words for the terminal: no ops server configured, nobody there, or its own refusal.
pub async fn get<T: DeserializeOwned>(config: &Config, path: &str) -> Result<T, CommandError> {
    let address = config.ops.listen.ok_or_else(|| {
        CommandError::Configuration(
            "ops.listen is `none`: only the running process knows, and it has no API".to_owned(),
        )
    })?;
    let failed = |error: reqwest::Error| {
        CommandError::Failed(format!("no answer from the ops server on {address}; is `sluicegate run` up? ({error})"))
    };
    let client = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        // Plain http on loopback: no certificate is ever looked at.
        .tls_certs_only([])
        .timeout(ANSWER_TIME_MAX)
        .build()
        .map_err(failed)?;
    let mut request = client.get(format!("http://{address}{path}"));
    if let Some(token) = &config.ops.token {
        request = request.bearer_auth(token.expose_secret());
    }
    let answer = request.send().await.map_err(failed)?;
    let status = answer.status();
    if !status.is_success() {
        let body: serde_json::Value = answer.json().await.unwrap_or_default();
        let reason = body["error"].as_str().unwrap_or_default();
        return Err(CommandError::Failed(format!("the ops server answered {status}: {reason}")));
    }
    answer.json().await.map_err(failed)
}
