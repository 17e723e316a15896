//! Redirects: whether one is followed, and the headers that the other server gets.
//!
//! A redirect to another origin gets the headers that say which bytes are requested, and no other: no
//! credential, signature, cookie or referrer. A request that is signed for its host is not
//! redirected. Addresses of the machine and of its links are no targets, unless the URL of the
//! request is one.

use http::header::{
    ACCEPT, AUTHORIZATION, HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH,
    IF_UNMODIFIED_SINCE, LOCATION, RANGE, USER_AGENT,
};
use http::{HeaderMap, Method, StatusCode};
use object_store::client::{HttpClient, HttpError, HttpRequest, HttpRequestBody, HttpResponse};
use reqwest::Url;

use crate::addresses::{Addresses, Reach, resolved};
use crate::refused::Refused;

/// The number of redirects of one request that are followed.
const REDIRECTS_MAX: usize = 10;

const CARRIED: &[HeaderName] =
    &[ACCEPT, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE, RANGE, USER_AGENT];

/// Sends a request, and follows the redirects of a GET or a HEAD.
pub(crate) async fn execute(
    client: &HttpClient,
    addresses: &Addresses,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let origin = url_of(&request)?;
    if !matches!(*request.method(), Method::GET | Method::HEAD) || !request.body().is_empty() {
        return client.execute(request).await;
    }
    let (method, mut headers) = (request.method().clone(), request.headers().clone());
    let mut url = origin.clone();
    let mut answer = client.execute(request).await?;
    for _ in 0..REDIRECTS_MAX {
        let Some(next) = target(&answer, &url)? else { return Ok(answer) };
        if next.origin() != url.origin() {
            headers = carried(&headers, &url, &next)?;
        }
        check_reach(&origin, &next, addresses).await?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method.clone();
        *request.uri_mut() =
            next.as_str().parse().map_err(|_| refused(&next, "the address is not a URI"))?;
        *request.headers_mut() = headers.clone();
        answer = client.execute(request).await?;
        url = next;
    }
    match target(&answer, &url)? {
        None => Ok(answer),
        Some(next) => Err(refused(&next, &format!("it is the last of {REDIRECTS_MAX} redirects"))),
    }
}

fn url_of(request: &HttpRequest) -> Result<Url, HttpError> {
    let url = Url::parse(&request.uri().to_string());
    url.map_err(|error| Refused::error(format!("the address of the store is not a URL: {error}")))
}

/// The target to which an answer redirects; `None` if it is not a redirect that has a target.
fn target(answer: &HttpResponse, url: &Url) -> Result<Option<Url>, HttpError> {
    let is_redirect = matches!(
        answer.status(),
        StatusCode::MOVED_PERMANENTLY
            | StatusCode::FOUND
            | StatusCode::SEE_OTHER
            | StatusCode::TEMPORARY_REDIRECT
            | StatusCode::PERMANENT_REDIRECT
    );
    let Some(location) = answer.headers().get(LOCATION).filter(|_| is_redirect) else {
        return Ok(None);
    };
    let next = location.to_str().ok().and_then(|location| url.join(location).ok());
    let next = next.filter(|next| matches!(next.scheme(), "http" | "https"));
    let mut next = next.ok_or_else(|| {
        Refused::error("the server redirects to an address that is not of a web server")
    })?;
    if url.scheme() == "https" && next.scheme() == "http" {
        return Err(refused(&next, "it has no TLS, which the URL has"));
    }
    next.set_fragment(None);
    // A name and a password are headers, or nothing.
    let _ = next.set_username("").and_then(|()| next.set_password(None));
    Ok(Some(next))
}

/// The headers for another origin.
fn carried(headers: &HeaderMap, from: &Url, next: &Url) -> Result<HeaderMap, HttpError> {
    let is_basic = |value: &http::HeaderValue| value.as_bytes().starts_with(b"Basic ");
    if headers.get(AUTHORIZATION).is_some_and(|value| !is_basic(value)) {
        let host = from.host_str().unwrap_or_default();
        return Err(refused(
            next,
            &format!(
                "the request is signed for {host}, and credentials go to no other host; set the \
                 region and the endpoint of the store"
            ),
        ));
    }
    let kept = headers.iter().filter(|(name, _)| CARRIED.contains(name));
    Ok(kept.map(|(name, value)| (name.clone(), value.clone())).collect())
}

fn refused(next: &Url, reason: &str) -> HttpError {
    let host = next.host_str().unwrap_or_default();
    Refused::error(format!("the server redirects to {host}, which is not followed: {reason}"))
}

/// Refuses a target on the machine or on its links, unless the URL of the request is there. Names are
/// resolved where the connection is made.
async fn check_reach(origin: &Url, next: &Url, addresses: &Addresses) -> Result<(), HttpError> {
    let (Some(host), Some(original)) = (next.host_str(), origin.host_str()) else { return Ok(()) };
    if host == original {
        return Ok(());
    }
    let reach = Reach::of_host(host);
    match reach {
        Some(Reach::Beyond) => Ok(()),
        Some(reach) if is_within(original, reach).await => Ok(()),
        Some(_) => {
            let reason =
                "it is an address of this machine or of its link, and the URL names another";
            Err(refused(next, reason))
        }
        None => {
            addresses.note_redirect_to(host);
            Ok(())
        }
    }
}

/// Whether a host has an address of a reach.
async fn is_within(host: &str, reach: Reach) -> bool {
    if let Some(known) = Reach::of_host(host) {
        return known == reach;
    }
    let found = resolved(host).await.unwrap_or_default();
    found.iter().any(|address| Reach::of(address.ip()) == reach)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn leads(origin: &str, next: &str) -> bool {
        let (origin, next) = (Url::parse(origin).unwrap(), Url::parse(next).unwrap());
        check_reach(&origin, &next, &Addresses::default()).await.is_ok()
    }

    #[tokio::test]
    async fn a_redirect_leads_to_this_machine_only_from_it() {
        let near = [
            "http://127.0.0.1/",
            "http://2130706433/",
            "http://0x7f.1/",
            "http://0.0.0.0/",
            "http://[::1]/",
            "http://[::]/",
            "http://[::ffff:127.0.0.1]/",
            "http://localhost:80/",
            "http://LOCALHOST./",
            "http://x.localhost/",
        ];
        let linked = [
            "http://169.254.169.254/",
            "http://[fe80::1]/",
            "http://[::ffff:169.254.1.1]/",
            "http://[fd00:ec2::254]/",
        ];
        for next in near.iter().chain(&linked) {
            assert!(!leads("https://93.184.215.14/", next).await, "{next}");
        }
        for next in near {
            assert!(leads("http://127.0.0.7:9000/", next).await, "{next}");
            assert!(!leads("http://169.254.0.1/", next).await, "{next}");
        }
        for next in linked {
            assert!(!leads("http://127.0.0.1/", next).await, "{next}");
            assert!(leads("http://169.254.0.1/", next).await, "{next}");
        }
        for next in ["https://93.184.215.14/", "https://cdn.example/", "http://10.0.0.1/"] {
            assert!(leads("https://93.184.215.15/", next).await, "{next}");
        }
    }
}
