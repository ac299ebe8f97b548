FROM python:3.12-slim
COPY . /src
RUN pip install --no-cache-dir "/src[hub,serve,shape]" && rm -r /src && useradd --create-home specdec
USER specdec
RUN mkdir /home/specdec/.cache
VOLUME /home/specdec/.cache
WORKDIR /home/specdec
EXPOSE 8080
ENTRYPOINT ["specdec", "serve", "--host", "0.0.0.0", "--api-key-file", "/keys"]
