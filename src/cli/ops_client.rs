//! The client of the running process's ops API.
//!
//! Another deployment's process may listen on `ops.listen`. So the client first asks without the token which deployment
//! the process works for. It accepts answers only from the deployment of the configured database. It follows no
//! redirects and uses no proxies: the token goes to `ops.listen` alone.

use std::net::SocketAddr;
use std::time::Duration;

use reqwest::{Client, RequestBuilder, Response, StatusCode};
use secrecy::ExposeSecret;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::{CommandContext, CommandError};
use crate::config::DatabaseUrl;
use crate::ledger::fleet::DeploymentId;
use crate::ops::openapi::{Deployment, HEADER};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time to connect to the process.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Longest time to read the deployment from the database. Without it a running process can still be asked.
const DATABASE_TIMEOUT: Duration = Duration::from_secs(3);

/// The response of the process.
#[derive(Debug)]
pub struct OpsResponse<T> {
    pub value: T,
    /// Why it is uncertain that the process works for the configured database, for stderr.
    pub unverified: Option<String>,
}

/// The deployment of the configured database.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ConfiguredDeployment {
    Known(DeploymentId),
    /// Each process has its own database in memory.
    InMemory,
    Unavailable(String),
}

/// The deployment that the process on `ops.listen` reports.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RunningDeployment {
    /// With the address of its database, if it reports that without the token.
    Deployment {
        id: DeploymentId,
        database: Option<String>,
    },
    Starting,
    NotSluicegate,
}

/// Reads one resource of the ops API; `None` when there is no running process to ask.
pub async fn get_if_running<T: DeserializeOwned>(
    cx: &CommandContext<'_>,
    path: &str,
) -> Result<Option<OpsResponse<T>>, CommandError> {
    let Some(address) = cx.config.ops.listen else { return Ok(None) };
    let reached = timeout(CONNECT_TIMEOUT, tokio::net::TcpStream::connect(address)).await;
    match reached {
        Ok(Ok(_)) => get(cx, path).await.map(Some),
        _ => Ok(None),
    }
}

/// Reads one resource of the ops API.
///
/// # Errors
/// When no ops server is configured or none answers, when it works for another deployment, or when it refuses.
pub async fn get<T: DeserializeOwned>(cx: &CommandContext<'_>, path: &str) -> Result<OpsResponse<T>, CommandError> {
    let address = cx.config.ops.listen.ok_or_else(|| {
        CommandError::Configuration(
            "ops.listen is `none`: only the running process knows, and it has no API".to_owned(),
        )
    })?;
    let client = Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        // Plain http on loopback: no certificate is checked.
        .tls_certs_only([])
        .timeout(RESPONSE_TIMEOUT)
        .build()
        .map_err(|error| no_response(address, error))?;
    let unnamed = client.get(format!("http://{address}/api/v1/deployment"));
    let (configured, listening) = tokio::join!(configured_deployment(cx), running_deployment(unnamed, address));
    let ours = cx.config.database.url.location();
    let (configured, listening) = (configured?, listening?);
    let unverified = verify_deployment(&configured, &listening, address, &ours)?;
    let mut request = client.get(format!("http://{address}{path}"));
    if let Some(token) = &cx.config.ops.token {
        request = request.bearer_auth(token.expose_secret());
    }
    let answer = request.send().await.map_err(|error| no_response(address, error))?;
    // Another process may have taken the port meanwhile.
    verify_deployment(&configured, &deployment_from_header(&answer), address, &ours)?;
    let value = read_body(answer, address).await?;
    Ok(OpsResponse { value, unverified })
}

async fn read_body<T: DeserializeOwned>(answer: Response, address: SocketAddr) -> Result<T, CommandError> {
    let status = answer.status();
    if !status.is_success() {
        let body: serde_json::Value = answer.json().await.unwrap_or_default();
        let reason = body["error"].as_str().unwrap_or_default();
        return Err(CommandError::Failed(format!("the ops server answered {status}: {reason}")));
    }
    answer.json().await.map_err(|error| no_response(address, error))
}

fn no_response(address: SocketAddr, error: reqwest::Error) -> CommandError {
    let error = error.without_url();
    // The outermost error says only that sending failed.
    let mut cause: &dyn std::error::Error = &error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    CommandError::Failed(format!(
        "no worker answers on `ops.listen` {address} ({cause}): start `sluicegate run`, or correct `ops.listen`"
    ))
}

async fn configured_deployment(cx: &CommandContext<'_>) -> Result<ConfiguredDeployment, CommandError> {
    if matches!(cx.config.database.url, DatabaseUrl::Sqlite { path: None, .. }) {
        return Ok(ConfiguredDeployment::InMemory);
    }
    let id = async { Ok::<_, CommandError>(cx.ledger().await?.deployment().await?) };
    match timeout(DATABASE_TIMEOUT, id).await {
        Ok(Ok(id)) => Ok(ConfiguredDeployment::Known(id)),
        Ok(Err(CommandError::BackendUnavailable(why))) => Ok(ConfiguredDeployment::Unavailable(why)),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(ConfiguredDeployment::Unavailable("the database does not answer".to_owned())),
    }
}

async fn running_deployment(request: RequestBuilder, address: SocketAddr) -> Result<RunningDeployment, CommandError> {
    let answer = request.send().await.map_err(|error| no_response(address, error))?;
    let mut running = deployment_from_header(&answer);
    if let RunningDeployment::Deployment { database, .. } = &mut running
        && answer.status().is_success()
    {
        *database = answer.json::<Deployment>().await.ok().map(|deployment| deployment.database);
    }
    Ok(running)
}

/// Reads the deployment from the header of a response.
fn deployment_from_header(answer: &Response) -> RunningDeployment {
    let header = answer.headers().get(HEADER).and_then(|id| id.to_str().ok());
    match header.and_then(|id| DeploymentId::parse(id).ok()) {
        Some(id) => RunningDeployment::Deployment { id, database: None },
        None if answer.status() == StatusCode::SERVICE_UNAVAILABLE => RunningDeployment::Starting,
        None => RunningDeployment::NotSluicegate,
    }
}

/// Checks that the process works for the configured database; returns a warning for stderr if that is uncertain.
fn verify_deployment(
    configured: &ConfiguredDeployment,
    listening: &RunningDeployment,
    ops: SocketAddr,
    ours: &str,
) -> Result<Option<String>, CommandError> {
    let (id, database) = match listening {
        RunningDeployment::Deployment { id, database } => (id, database),
        RunningDeployment::Starting => {
            return Err(CommandError::Failed(format!(
                "the process on {ops} (ops.listen) is starting and cannot answer yet: try again"
            )));
        }
        RunningDeployment::NotSluicegate => {
            return Err(CommandError::Failed(format!(
                "the program on {ops} (ops.listen) is not this version of Sluicegate: it names no deployment. Set ops.listen to the \
                 address of this deployment's `run`"
            )));
        }
    };
    let theirs = database.as_deref().unwrap_or("an address that it shows only with its token");
    let other = |ours: String| {
        Err(CommandError::OtherDeployment(format!(
            "the process on {ops} (ops.listen) works for another deployment. Its database: {theirs} (deployment {id}). \
             This configuration's database: {ours}. To see the other deployment, use its configuration (--config FILE, or its \
             directory); to see this one, set ops.listen to the address of its own `run`, here and there"
        )))
    };
    match configured {
        ConfiguredDeployment::Known(known) if known == id => Ok(None),
        ConfiguredDeployment::Known(known) => other(format!("{ours} (deployment {known})")),
        ConfiguredDeployment::InMemory if database.as_ref().is_none_or(|theirs| theirs == ours) => Ok(None),
        ConfiguredDeployment::InMemory => other(ours.to_owned()),
        ConfiguredDeployment::Unavailable(_) if database.as_deref() == Some(ours) => Ok(None),
        ConfiguredDeployment::Unavailable(why) => Ok(Some(format!(
            "not verified that the process on {ops} (ops.listen) works for {ours}, because that database is unavailable \
             ({why}): its own database is {theirs} (deployment {id})"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_configured_deployment_is_trusted() {
        let id =
            |digit: &str| DeploymentId::parse(&"00000000-0000-4000-8000-000000000000".replace('0', digit)).unwrap();
        let (ours, theirs) = (id("1"), id("2"));
        let listening =
            |id, database: Option<&str>| RunningDeployment::Deployment { id, database: database.map(str::to_owned) };
        let unavailable = ConfiguredDeployment::Unavailable("refused".to_owned());
        let at = ([127, 0, 0, 1], 9_464).into();
        let verdict =
            |configured: &ConfiguredDeployment, listening: &RunningDeployment, database: &str| match verify_deployment(
                configured, listening, at, database,
            ) {
                Ok(None) => "believed".to_owned(),
                Ok(Some(warning)) => format!("warning: {warning}"),
                Err(CommandError::OtherDeployment(text)) => format!("other: {text}"),
                Err(error) => format!("failed: {error}"),
            };
        let (a, b) = ("sqlite:///a.db", "sqlite:///b.db");
        for (configured, listening, database, wanted) in [
            (ConfiguredDeployment::Known(ours), listening(ours, Some(a)), a, vec!["believed"]),
            // One database by two names.
            (ConfiguredDeployment::Known(ours), listening(ours, Some(b)), a, vec!["believed"]),
            (
                ConfiguredDeployment::Known(ours),
                listening(theirs, Some(b)),
                a,
                vec!["other: ", a, b, "11111111-", "22222222-"],
            ),
            (ConfiguredDeployment::Known(ours), listening(theirs, None), a, vec!["other: ", "only with its token"]),
            (ConfiguredDeployment::Known(ours), RunningDeployment::Starting, a, vec!["failed: ", "is starting"]),
            (
                ConfiguredDeployment::Known(ours),
                RunningDeployment::NotSluicegate,
                a,
                vec!["failed: ", "names no deployment"],
            ),
            (
                ConfiguredDeployment::InMemory,
                listening(theirs, Some("sqlite::memory:")),
                "sqlite::memory:",
                vec!["believed"],
            ),
            (ConfiguredDeployment::InMemory, listening(theirs, None), "sqlite::memory:", vec!["believed"]),
            (ConfiguredDeployment::InMemory, listening(theirs, Some(b)), "sqlite::memory:", vec!["other: ", b]),
            (unavailable.clone(), listening(theirs, Some(a)), a, vec!["believed"]),
            (unavailable.clone(), listening(theirs, Some(b)), a, vec!["warning: ", a, b, "refused"]),
            (unavailable, listening(theirs, None), a, vec!["warning: ", "22222222-"]),
        ] {
            let text = verdict(&configured, &listening, database);
            for needed in wanted {
                assert!(text.contains(needed), "{configured:?} {listening:?}: no {needed:?} in {text}");
            }
        }
    }
}
