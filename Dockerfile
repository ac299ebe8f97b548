FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir "/src[hub,serve]" && rm -r /src && useradd --create-home --home-dir /specdec specdec
USER specdec
RUN mkdir /specdec/.cache
VOLUME /specdec/.cache
WORKDIR /specdec
EXPOSE 8080
ENTRYPOINT ["specdec", "serve", "--host", "0.0.0.0", "--api-key-file", "/keys"]
