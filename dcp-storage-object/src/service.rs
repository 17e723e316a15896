//! The connections of a provider, with what `object_store` does not do: a condition on the
//! completion of an upload, the pause that a throttling answer requests, bounds of answers, and
//! redirects without secrets.

#[cfg(any(feature = "s3", feature = "gcs", feature = "azure"))]
use std::future::Future;
use std::sync::{Arc, Once};
use std::time::Duration;

use async_trait::async_trait;
use http::header::RETRY_AFTER;
use http::{HeaderName, HeaderValue, StatusCode};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientOptions, Result};

use crate::addresses::Addresses;
use crate::answer::Subject;
use crate::{answer, client, redirect};

/// The longest pause that an answer can request.
const PAUSE_MAX: Duration = Duration::from_secs(30);

tokio::task_local! {
    /// The condition of the completion that this task is at.
    static CONDITION: Arc<Condition>;
}

/// A header that is added to a request which makes an upload an object.
pub(crate) struct Condition {
    pub(crate) name: HeaderName,
    pub(crate) value: HeaderValue,
    /// Whether a request is that one.
    pub(crate) applies: fn(&HttpRequest) -> bool,
    /// Signs the request again, where the signature covers the header.
    #[expect(clippy::type_complexity, reason = "a closure with the credentials")]
    pub(crate) sign: Option<Box<dyn Fn(&mut HttpRequest) -> Result<()> + Send + Sync>>,
}

/// Runs an operation, of which one request gets the header.
#[cfg(any(feature = "s3", feature = "gcs", feature = "azure"))]
pub(crate) async fn with_condition<F: Future>(condition: Condition, completion: F) -> F::Output {
    CONDITION.scope(Arc::new(condition), completion).await
}

/// Makes the connections of a store.
#[derive(Debug, Default)]
pub(crate) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> Result<HttpClient> {
        install_provider();
        let addresses = Addresses::default();
        let client = HttpClient::new(client::build(options, addresses.clone())?);
        Ok(HttpClient::new(Service { client, addresses }))
    }
}

/// Gives the process the cryptography of TLS, unless it has chosen one. reqwest is built here without
/// one, and so for every crate of the program: without this, their first client panics.
pub(crate) fn install_provider() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // An error means that the program has chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

#[derive(Debug)]
struct Service {
    client: HttpClient,
    addresses: Addresses,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if let Ok(condition) = CONDITION.try_with(Arc::clone)
            && (condition.applies)(&request)
        {
            request.headers_mut().insert(&condition.name, condition.value.clone());
            if let Some(sign) = &condition.sign {
                sign(&mut request).map_err(|error| {
                    HttpError::new(object_store::client::HttpErrorKind::Unknown, error)
                })?;
            }
        }
        let subject = Subject::of(&request);
        let answer = redirect::execute(&self.client, &self.addresses, request).await?;
        if let Some(pause) = pause_of(&answer) {
            tracing::debug!(?pause, "the store requests a pause");
            tokio::time::sleep(pause).await;
        }
        answer::bounded(answer, subject).await
    }
}

/// The pause that a throttling answer requests.
fn pause_of(answer: &HttpResponse) -> Option<Duration> {
    let throttled = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
    if !throttled.contains(&answer.status()) {
        return None;
    }
    let seconds = answer.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(PAUSE_MAX))
}
