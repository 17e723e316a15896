//! The client of a store's connections. It follows no redirect and sends no referrer; what is done
//! with a redirect is in `redirect`.

use std::time::Duration;

use object_store::{ClientConfigKey as Setting, ClientOptions, Error, Result};
use reqwest::{Certificate, Client, ClientBuilder, NoProxy, Proxy, redirect};

use crate::addresses::{Addresses, Resolver};

const STORE: &str = "HTTP client";

const USER_AGENT: &str = concat!("dcp/", env!("CARGO_PKG_VERSION"));

type SetTime = fn(ClientBuilder, Duration) -> ClientBuilder;
type SetFlag = fn(ClientBuilder) -> ClientBuilder;

const TIMES: &[(Setting, SetTime)] = &[
    (Setting::Timeout, ClientBuilder::timeout),
    (Setting::ConnectTimeout, ClientBuilder::connect_timeout),
    (Setting::ReadTimeout, ClientBuilder::read_timeout),
    (Setting::PoolIdleTimeout, |builder, time| builder.pool_idle_timeout(time)),
    (Setting::Http2KeepAliveInterval, |builder, time| builder.http2_keep_alive_interval(time)),
    (Setting::Http2KeepAliveTimeout, ClientBuilder::http2_keep_alive_timeout),
];

const FLAGS: &[(Setting, SetFlag)] = &[
    (Setting::Http2KeepAliveWhileIdle, |builder| builder.http2_keep_alive_while_idle(true)),
    (Setting::Http1Only, ClientBuilder::http1_only),
    (Setting::Http2Only, ClientBuilder::http2_prior_knowledge),
    (Setting::AllowInvalidCertificates, |builder| builder.danger_accept_invalid_certs(true)),
    (Setting::NoSystemCertificates, |builder| {
        builder.tls_certs_only(std::iter::empty::<Certificate>())
    }),
];

/// A client with the options of a store. The client that `object_store` makes of them follows
/// redirects to any host, with the address of the request as the referrer.
pub(crate) fn build(options: &ClientOptions, addresses: Addresses) -> Result<Client> {
    let settings = Settings(options);
    let mut builder = Client::builder()
        .redirect(redirect::Policy::none())
        .referer(false)
        // A compressed body does not have the length that the answer names.
        .no_gzip()
        .no_brotli()
        .no_zstd()
        .no_deflate()
        .user_agent(settings.text(Setting::UserAgent).unwrap_or_else(|| USER_AGENT.to_owned()));
    if let Some(headers) = options.get_default_headers() {
        builder = builder.default_headers(headers.clone());
    }
    for (setting, set) in TIMES {
        if let Some(time) =
            settings.parsed(*setting, |text| humantime::parse_duration(text).ok())?
        {
            builder = set(builder, time);
        }
    }
    for (setting, set) in FLAGS {
        if settings.flag(*setting)? {
            builder = set(builder);
        }
    }
    if let Some(number) = settings.parsed(Setting::PoolMaxIdlePerHost, |text| text.parse().ok())? {
        builder = builder.pool_max_idle_per_host(number);
    }
    if let Some(bytes) =
        settings.parsed(Setting::Http2MaxFrameSize, |text| text.parse::<u32>().ok())?
    {
        builder = builder.http2_max_frame_size(bytes);
    }
    if let Some(proxy) = settings.text(Setting::ProxyUrl) {
        if let Some(certificate) = settings.text(Setting::ProxyCaCertificate) {
            let certificate = Certificate::from_pem(certificate.as_bytes()).map_err(failed)?;
            builder = builder.tls_certs_merge([certificate]);
        }
        let excluded = settings.text(Setting::ProxyExcludes);
        let excluded = excluded.and_then(|excluded| NoProxy::from_string(&excluded));
        builder = builder.proxy(Proxy::all(proxy).map_err(failed)?.no_proxy(excluded));
    }
    let is_shuffled = settings.flag(Setting::RandomizeAddresses)?;
    builder
        .dns_resolver(Resolver { addresses, is_shuffled })
        .https_only(!settings.flag(Setting::AllowHttp)?)
        .build()
        .map_err(failed)
}

fn failed(error: reqwest::Error) -> Error {
    Error::Generic { store: STORE, source: Box::new(error) }
}

/// The options by name, in the forms that `object_store` reads.
struct Settings<'a>(&'a ClientOptions);

impl Settings<'_> {
    fn text(&self, setting: Setting) -> Option<String> {
        self.0.get_config_value(&setting)
    }

    fn parsed<T>(&self, setting: Setting, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
        let Some(text) = self.text(setting) else { return Ok(None) };
        let parsed = parse(&text).ok_or_else(|| Error::Generic {
            store: STORE,
            source: format!("the setting {} does not take this value", setting.as_ref()).into(),
        });
        parsed.map(Some)
    }

    fn flag(&self, setting: Setting) -> Result<bool> {
        let flag = |text: &str| match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "on" | "yes" | "y" => Some(true),
            "0" | "false" | "off" | "no" | "n" => Some(false),
            _ => None,
        };
        Ok(self.parsed(setting, flag)?.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_cannot_be_read_is_named() {
        for (setting, value) in [
            (Setting::ConnectTimeout, "5 parsecs"),
            (Setting::AllowHttp, "maybe"),
            (Setting::PoolMaxIdlePerHost, "-1"),
            (Setting::Http2MaxFrameSize, "x"),
        ] {
            let options = ClientOptions::new().with_config(setting, value);
            let error = build(&options, Addresses::default()).unwrap_err();
            assert!(error.to_string().contains(setting.as_ref()), "{error}");
        }
    }
}
