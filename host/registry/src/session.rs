//! The requests of one pull or push, within its limits.

use std::cell::RefCell;
use std::time::Duration;

use meridian_core::oci::{OciReference, is_loopback};
use reqwest::header::{
    ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER, WWW_AUTHENTICATE,
};
use reqwest::{Client, Method, RequestBuilder, Response, Url, redirect};
use serde::Deserialize;

use crate::auth::{Challenge, Credentials, is_docker_hub, secret};
use crate::{Limits, Problem};

/// Most redirects of one request.
const MAX_REDIRECTS: u32 = 5;
/// Largest answer of a token's server, and of an upload, bytes.
const MAX_ANSWER_BYTES: u64 = 64 << 10;

/// What the session may do in the repository.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Pull,
    Push,
}

pub(crate) struct Session<'a> {
    client: Client,
    base: Url,
    reference: &'a OciReference,
    limits: &'a Limits,
    access: Access,
    /// For the registry's own origin, once it has asked for it.
    authorization: RefCell<Option<HeaderValue>>,
}

/// A request.
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    pub(crate) url: Url,
    /// For errors.
    pub(crate) what: &'a str,
    pub(crate) accept: Option<&'static str>,
    /// Its type and content.
    pub(crate) body: Option<(&'static str, Vec<u8>)>,
    /// The largest answer, bytes.
    pub(crate) limit: u64,
}

/// The answer to a request: any but a redirect that was followed, and a challenge that was met.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(reference: &'a OciReference, limits: &'a Limits, access: Access) -> Result<Self, Problem> {
        let is_near = reference.is_loopback();
        // Fails when the program has installed its own, which does as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .connect_timeout(limits.connect)
            .read_timeout(limits.silence)
            .redirect(redirect::Policy::none())
            .referer(false)
            .user_agent(concat!("meridian/", env!("CARGO_PKG_VERSION")));
        // A proxy has another loopback.
        let client = if is_near { client.no_proxy() } else { client.https_only(true) };
        let unfit = |why: String| Problem::Unfit { reason: format!("no HTTP client: {why}") };
        let client = client.build().map_err(|error| unfit(one_line(&error)))?;
        let scheme = if is_near { "http" } else { "https" };
        let host = if is_docker_hub(reference.host()) { "registry-1.docker.io" } else { reference.host() };
        let base = format!("{scheme}://{host}/v2/{}/", reference.repository());
        let base = Url::parse(&base).map_err(|error| unfit(error.to_string()))?;
        Ok(Self { client, base, reference, limits, access, authorization: RefCell::default() })
    }

    /// The address of a manifest or blob of the repository.
    pub(crate) fn url(&self, path: &str) -> Url {
        self.base.join(path).expect("digests, tags and fixed words make paths")
    }

    /// The bytes behind an address; `None` when the registry does not have it.
    pub(crate) async fn get(
        &self,
        what: &str,
        path: &str,
        accept: Option<&'static str>,
        limit: u64,
    ) -> Result<Option<Vec<u8>>, Problem> {
        self.attempts(async || {
            let url = self.url(path);
            let answer = self.ask(&Ask { method: Method::GET, url, what, accept, body: None, limit }).await?;
            match answer.status {
                200 => Ok(Some(answer.body)),
                404 => Ok(None),
                _ => Err(self.refused(what, &answer, "200")),
            }
        })
        .await
    }

    /// Try until it succeeds, until its problem is one that stays, or until the attempts are used up.
    pub(crate) async fn attempts<T>(&self, attempt: impl AsyncFn() -> Result<T, Problem>) -> Result<T, Problem> {
        let mut pause = self.limits.backoff;
        for _ in 1..self.limits.attempts {
            match attempt().await {
                Err(problem) if problem.is_worth_another_attempt() => {
                    tracing::debug!(reference = %self.reference, %problem, "another attempt");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(self.limits.longest_backoff);
                }
                done => return done,
            }
        }
        attempt().await
    }

    pub(crate) fn refused(&self, what: &str, answer: &Answer, expected: &'static str) -> Problem {
        let what = what.to_owned();
        match answer.status {
            404 => Problem::NotFound { what },
            status @ (401 | 403) => {
                let is_known = self.authorization.borrow().is_some();
                let given = if is_known {
                    "the credentials of the docker configuration"
                } else {
                    "a caller without credentials"
                };
                Problem::Unauthorized { what, given, status }
            }
            status => Problem::Status { what, status, expected },
        }
    }

    /// One request, with the redirects that it may follow and the challenge that it can meet.
    pub(crate) async fn ask(&self, ask: &Ask<'_>) -> Result<Answer, Problem> {
        let mut url = ask.url.clone();
        let (mut redirects, mut was_challenged) = (0, false);
        loop {
            let response = self.send(ask, &url).await?;
            let status = response.status().as_u16();
            if status == 401 && !was_challenged && self.is_own(&url) {
                was_challenged = true;
                let scope = self.scope();
                let challenges = response.headers().get_all(WWW_AUTHENTICATE).iter();
                if let Some(challenge) = Challenge::of(challenges, self.reference, &scope) {
                    self.authorize(ask.what, challenge).await?;
                    continue;
                }
            }
            let is_read = matches!(ask.method, Method::GET | Method::HEAD);
            if is_read && matches!(status, 301 | 302 | 303 | 307 | 308) {
                redirects += 1;
                url = self.redirected(ask.what, &url, &response, redirects)?;
                continue;
            }
            let headers = response.headers().clone();
            self.pause_as_told(status, &headers).await;
            let limit = if status == 200 { ask.limit } else { MAX_ANSWER_BYTES };
            let body = match read(ask.what, response, limit).await {
                // What else it says is of no interest.
                Err(Problem::TooLarge { .. }) if status != 200 => Vec::new(),
                read => read?,
            };
            return Ok(Answer { status, headers, body });
        }
    }

    async fn send(&self, ask: &Ask<'_>, url: &Url) -> Result<Response, Problem> {
        let mut request = self.client.request(ask.method.clone(), url.clone());
        if let Some(accept) = ask.accept {
            request = request.header(ACCEPT, accept);
        }
        if let Some((media_type, body)) = &ask.body {
            request = request.header(CONTENT_TYPE, *media_type).body(body.clone());
        }
        if self.is_own(url)
            && let Some(authorization) = &*self.authorization.borrow()
        {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.send().await.map_err(|error| unreachable(ask.what, &error))
    }

    /// Whether credentials may go there.
    fn is_own(&self, url: &Url) -> bool {
        url.origin() == self.base.origin()
    }

    fn redirected(&self, what: &str, from: &Url, response: &Response, redirects: u32) -> Result<Url, Problem> {
        let refused = |reason: String| Problem::Redirect { what: what.to_owned(), reason };
        if redirects > MAX_REDIRECTS {
            return Err(refused(format!("more than {MAX_REDIRECTS} times, expected at most that")));
        }
        let location = response.headers().get(LOCATION).and_then(|location| location.to_str().ok());
        let to = location.and_then(|location| from.join(location).ok());
        let to = to.ok_or_else(|| refused("to no address, expected a Location".into()))?;
        // The path and the query of such an address are often its password, so only the host is named.
        let host = to.host_str().unwrap_or_default();
        let is_near = self.reference.is_loopback() && is_loopback(host);
        if to.scheme() != "https" && !(to.scheme() == "http" && is_near) {
            return Err(refused(format!("to {}://{host}, expected https", to.scheme())));
        }
        Ok(to)
    }

    /// The registry may know best when to come back; only within reason.
    async fn pause_as_told(&self, status: u16, headers: &HeaderMap) {
        if !matches!(status, 429 | 503) {
            return;
        }
        let told = headers.get(RETRY_AFTER).and_then(|seconds| seconds.to_str().ok()?.parse().ok());
        if let Some(seconds) = told {
            tokio::time::sleep(Duration::from_secs(seconds).min(self.limits.longest_backoff)).await;
        }
    }

    fn scope(&self) -> String {
        let actions = match self.access {
            Access::Pull => "pull",
            Access::Push => "pull,push",
        };
        format!("repository:{}:{actions}", self.reference.repository())
    }

    async fn authorize(&self, what: &str, challenge: Challenge) -> Result<(), Problem> {
        let credentials = Credentials::of(self.reference, self.limits.silence).await?;
        let header = match (challenge, &credentials) {
            (_, Credentials::Token(token)) => secret(&format!("Bearer {token}")),
            (Challenge::Basic, _) => credentials.basic(),
            (Challenge::Bearer { realm, service, scope }, _) => {
                let request = match &credentials {
                    Credentials::Refresh(token) => self.exchange(realm, service.as_deref(), &scope, token),
                    _ => self.client.get(realm),
                };
                Some(self.token(what, request, &credentials).await?)
            }
        };
        if header.is_none() && matches!(credentials, Credentials::Refresh(_)) {
            let reason =
                "the docker configuration has an identity token, and the registry wants a user name and a password";
            return Err(Problem::Credentials { reason: reason.into() });
        }
        // Without one the next answer is the same, and is told.
        *self.authorization.borrow_mut() = header;
        Ok(())
    }

    /// The request that exchanges a refresh token (OAuth 2): a form with what the realm has in its query, and the token.
    fn exchange(&self, mut realm: Url, service: Option<&str>, scope: &str, token: &str) -> RequestBuilder {
        realm.set_query(None);
        let mut form = realm.clone();
        form.query_pairs_mut()
            .append_pair("grant_type", "refresh_token")
            .extend_pairs(service.map(|service| ("service", service)))
            .append_pair("scope", scope)
            .append_pair("client_id", "meridian")
            .append_pair("refresh_token", token);
        let form = form.query().unwrap_or_default().to_owned();
        self.client.post(realm).header(CONTENT_TYPE, "application/x-www-form-urlencoded").body(form)
    }

    async fn token(
        &self,
        what: &str,
        mut request: RequestBuilder,
        credentials: &Credentials,
    ) -> Result<HeaderValue, Problem> {
        #[derive(Deserialize)]
        struct Token {
            token: Option<String>,
            access_token: Option<String>,
        }
        let what = format!("{what}: the token");
        if let Some(basic) = credentials.basic() {
            request = request.header(AUTHORIZATION, basic);
        }
        let response = request.send().await.map_err(|error| unreachable(&what, &error))?;
        let status = response.status().as_u16();
        if matches!(status, 401 | 403) {
            return Err(Problem::Unauthorized { what, given: credentials.given(), status });
        }
        if status != 200 {
            return Err(Problem::Status { what, status, expected: "200" });
        }
        let body = read(&what, response, MAX_ANSWER_BYTES).await?;
        let found = serde_json::from_slice(&body).ok().and_then(|Token { token, access_token }| token.or(access_token));
        found.and_then(|token| secret(&format!("Bearer {token}"))).ok_or_else(|| Problem::Credentials {
            reason: "the registry's server of tokens gave none, expected a JSON object with \"token\"".into(),
        })
    }
}

/// The whole body, if it is not too large.
async fn read(what: &str, mut response: Response, limit: u64) -> Result<Vec<u8>, Problem> {
    let too_large = || Problem::TooLarge { what: what.to_owned(), limit };
    if response.content_length().is_some_and(|length| length > limit) {
        return Err(too_large());
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(what, &error))? {
        if (body.len() + chunk.len()) as u64 > limit {
            return Err(too_large());
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

fn unreachable(what: &str, error: &reqwest::Error) -> Problem {
    Problem::Unreachable { what: what.to_owned(), why: one_line(error) }
}

/// The innermost cause, which says most; addresses may hold a password and are left out.
fn one_line(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "it does not answer in time".into();
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string().lines().next().unwrap_or_default().to_owned()
}
